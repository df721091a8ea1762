"""The time each method adds to a training step, beside the paper's Table 3."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from infssm._machine import measure
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
    makers: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("seq", {}),
        "ewc": ("ewc", {}),
        "x-der": ("x-der", {"buffer_size": 4 * batch_size}),
        "inf-ssm": ("inf-ssm", {}),
    }
    for kind in choose_kinds(kinds):
        if kind != "simplified":
            makers[f"exact: {kind}"] = ("inf-ssm-exact", {"distance": kind, "weight": 1.0})
    methods, fisher = {}, 0.0
    first, second = TaskInfo(0, range(_CLASSES // 2)), TaskInfo(1, range(_CLASSES // 2, _CLASSES))
    for label, (name, own) in makers.items():
        module = create_model(model, num_classes=_CLASSES, **options)
        method = build_method(module, name, num_classes=_CLASSES, num_tasks=2, **own)
        count = fisher_images if name == "ewc" else 4 * batch_size
        loader = [_batch(method, count, range(_CLASSES // 2))]
        method.begin_task(first, loader)
        [seconds] = measure(partial(method.end_task, first, loader), 1, warmup=0)
        fisher = seconds if name == "ewc" else fisher
        with torch.no_grad():  # the new model has moved: equal states would take short cuts
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        method.begin_task(second, loader)
        methods[label] = method
    forward, step = _time(methods, _batch(methods["plain"], batch_size, range(_CLASSES // 2, _CLASSES)), repeats)
    rows: list[dict[str, Any]] = [
        {
            "method": label,
            "extra_loss_s": forward[label] - forward["plain"],
            "extra_step_s": step[label] - step["plain"],
            "relative_step": step[label] / step["plain"],
        }
        for label in methods
        if label != "plain"
    ]
    data: dict[str, Any] = {
        "model": model,
        "model_options": options,
        "batch_size": batch_size,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "plain_step_s": step["plain"],
        "rows": rows,
        "fisher_s_per_image": fisher / fisher_images,
        "paper": paper_numbers()["latency"],
    }
    plain, per_image = step["plain"], fisher / fisher_images
    shown = ", ".join(f"{row['method']} {100 * (row['relative_step'] - 1):+.0f} %" for row in rows)
    paper = ", ".join(f"{r['operation']} {r['mean_s']:.4g} s" for r in data["paper"]["rows"])
    text = (
        f"A plain step of {model} at batch {batch_size} takes {1e3 * plain:.0f} ms on "
        f"{data['threads']} thread(s). Added to it: {shown}. EWC's Fisher takes {1e3 * per_image:.1f} "
        f"ms per image: {per_image * 1000 / plain:.0f} plain steps for a task of 1,000 images. "
        f"The paper's Table 3 (Vim-small, one A40, batch not stated): {paper}."
    )
    return Study("latency", data, _figure(data), text)


def _batch(method: Method, count: int, classes: range) -> Batch:
    """Random images of the size that the method's model takes."""
    size, embed = getattr(method.module, "img_size", None), getattr(method.module, "patch_embed", None)
    if size is None or embed is None:
        raise ConfigError("the latency study times image classifiers of the Vim family; choose such a model")
    channels = next(embed.parameters()).shape[1]
    raw = torch.randint(0, 256, (count, channels, *size), dtype=torch.uint8)
    return Batch(raw.float() / 255, torch.arange(count) % len(classes) + classes.start, raw=raw)


def _time(methods: Mapping[str, Method], batch: Batch, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of the loss, and of loss and backward; the first round warms up and is not counted."""
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
    medians = ({label: statistics.median(seconds) for label, seconds in times.items()} for times in (forward, both))
    return next(medians), next(medians)


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
