"""What each method adds to a training step, beside the paper's Table 3."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infssm.bench.presets import paper_numbers
from infssm.bench.studies.study import Study, axes, choose_kinds, register_study
from infssm.errors import ConfigError
from infssm.methods import Batch, Method, TaskInfo, build_method, total_loss
from infssm.models import create_model

_CLASSES = 20


@register_study("latency")
def latency(
    *,
    model: str = "vim_nano",
    model_options: Mapping[str, Any] | None = None,
    batch_size: int = 8,
    fisher_images: int = 16,
    repeats: int = 5,
    kinds: str | Sequence[str] = "all",
    seed: int = 0,
) -> Study:
    """Median time of a step (loss and backward) with each method, less that of a plain step, on random images.

    Also EWC's Fisher pass, which takes one backward per image of a task. Methods take turns, so that a busy machine
    slows all of them alike. Image augmentation is not counted. kinds: distances of ``inf-ssm-exact``, or ``"all"``.
    """
    options = dict(model_options or {})
    torch.manual_seed(seed)
    chosen = choose_kinds(kinds)
    makers: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("seq", {}),
        "ewc": ("ewc", {}),
        "x-der": ("x-der", {"buffer_size": 4 * batch_size}),
        "inf-ssm": ("inf-ssm", {}),
    }
    makers |= {f"exact: {k}": ("inf-ssm-exact", {"distance": k, "weight": 1.0}) for k in chosen if k != "simplified"}
    methods, fisher = {}, 0.0
    for label, (name, own) in makers.items():
        methods[label], seconds = _prepared(name, own, model, options, batch_size, fisher_images)
        fisher = seconds if label == "ewc" else fisher
    shape = _image_shape(methods["plain"])
    batch = _batch(batch_size, shape, range(_CLASSES // 2, _CLASSES))
    forward, step = _time(methods, batch, repeats)
    data: dict[str, Any] = {
        "model": model,
        "model_options": options,
        "batch_size": batch_size,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "plain_step_s": step["plain"],
        "rows": [
            {
                "method": label,
                "extra_loss_s": forward[label] - forward["plain"],
                "extra_step_s": step[label] - step["plain"],
                "relative_step": step[label] / step["plain"],
            }
            for label in methods
            if label != "plain"
        ],
        "fisher_s_per_image": fisher / fisher_images,
        "paper": paper_numbers()["latency"],
    }
    return Study("latency", data, _figure(data), _text(data))


def _prepared(
    name: str, options: dict[str, Any], model: str, model_options: dict[str, Any], batch_size: int, images: int
) -> tuple[Method, float]:
    """A method in the middle of task 1, and the seconds its end of task 0 took."""
    module = create_model(model, num_classes=_CLASSES, **model_options)
    method = build_method(module, name, num_classes=_CLASSES, num_tasks=2, **options)
    first, second = TaskInfo(0, range(_CLASSES // 2)), TaskInfo(1, range(_CLASSES // 2, _CLASSES))
    count = images if name == "ewc" else 4 * batch_size
    loader = [_batch(count, _image_shape(method), first.classes or range(0))]
    method.begin_task(first, loader)
    start = time.perf_counter()
    method.end_task(first, loader)
    seconds = time.perf_counter() - start
    with torch.no_grad():  # the new model has moved: equal states would take short cuts
        for parameter in method.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    method.begin_task(second, loader)
    return method, seconds


def _image_shape(method: Method) -> tuple[int, int, int]:
    size, embed = getattr(method.module, "img_size", None), getattr(method.module, "patch_embed", None)
    if size is None or embed is None:
        raise ConfigError("the latency study times image classifiers of the Vim family; choose such a model")
    channels = next(embed.parameters()).shape[1]
    return int(channels), int(size[0]), int(size[1])


def _batch(count: int, shape: tuple[int, int, int], classes: range) -> Batch:
    raw = torch.randint(0, 256, (count, *shape), dtype=torch.uint8)
    y = torch.arange(count) % len(classes) + classes.start
    return Batch(raw.float() / 255, y, raw=raw)


def _time(methods: Mapping[str, Method], batch: Batch, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of the loss alone and of loss and backward; the first round warms up and is not counted."""
    forward: dict[str, list[float]] = {label: [] for label in methods}
    both: dict[str, list[float]] = {label: [] for label in methods}
    for turn in range(repeats + 1):
        for label, method in methods.items():
            start = time.perf_counter()
            total = total_loss(method.loss(batch))
            middle = time.perf_counter()
            total.backward()  # type: ignore[no-untyped-call]
            end = time.perf_counter()
            method.module.zero_grad()
            if turn:
                forward[label].append(middle - start)
                both[label].append(end - start)
    median: Callable[[list[float]], float] = statistics.median
    return {k: median(v) for k, v in forward.items()}, {k: median(v) for k, v in both.items()}


def _text(data: dict[str, Any]) -> str:
    rows = {row["method"]: row for row in data["rows"]}
    plain = data["plain_step_s"]
    shown = ", ".join(f"{k} {100 * (row['relative_step'] - 1):+.0f} %" for k, row in rows.items())
    paper = ", ".join(f"{r['operation']} {r['mean_s']:.4g} s" for r in data["paper"]["rows"])
    return (
        f"A plain step of {data['model']} at batch {data['batch_size']} takes {1e3 * plain:.0f} ms on "
        f"{data['threads']} thread(s). Added to it: {shown}. EWC's Fisher takes {1e3 * data['fisher_s_per_image']:.1f} "
        f"ms per image: {data['fisher_s_per_image'] * 1000 / plain:.0f} plain steps for a task of 1,000 images. "
        f"The paper's Table 3 (Vim-small, one A40, batch not stated): {paper}."
    )


def _figure(data: dict[str, Any]) -> Any:
    figure, (left, right) = axes(2, width=5.4, height=4.2)
    rows = data["rows"][::-1]
    places = range(len(rows))
    bars = left.barh(places, [r["relative_step"] for r in rows], 0.6)
    left.axvline(1, color="k", linestyle="--", linewidth=1)
    left.bar_label(bars, [f"{1e3 * r['extra_step_s']:+.0f} ms" for r in rows], padding=3, fontsize=8)
    left.set_yticks(places, [r["method"] for r in rows])
    left.set(xlabel="time of a step, in plain steps", xlim=(0, 1.25 * max(r["relative_step"] for r in rows)))
    left.set_title(f"{data['model']}, batch {data['batch_size']}; plain step {1e3 * data['plain_step_s']:.0f} ms")
    paper = data["paper"]["rows"][::-1]
    right.barh(range(len(paper)), [r["mean_s"] for r in paper], 0.5, color="0.5")
    right.set_yticks(range(len(paper)), [r["operation"] for r in paper])
    right.set(xscale="log", xlabel="seconds", title="paper, Table 3 (Vim-small, A40)")
    return figure
