"""Studies of the penalty: which blocks to regularize, and what training on the penalty alone does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infssm.bench.executors import Experiment, InProcess, gather, results
from infssm.bench.presets import main_job
from infssm.bench.studies.study import Study, TrainedRun, axes, choose_kinds, register_study, states_of
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge, parse_overrides, to_dict
from infssm.learner.metrics import summarize
from infssm.learner.optim import build_optimizer, decay_groups, set_learning_rate
from infssm.learner.result import Result
from infssm.learner.store.directory import RunDirectory
from infssm.methods import Batch, Method, build_method, train_step
from infssm.models import create_model
from infssm.ssm import StateSpace, find_mixers

_MEASURES = ("aa", "aia", "fm")
_IMAGES = 16
"""Images on which the drift is measured."""


@register_study("blocks")
def blocks(
    *,
    run: str | os.PathLike[str] | None = None,
    method: str = "inf-ssm-exact",
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
    out: str | os.PathLike[str] = "runs",
    data_root: str | None = None,
) -> Study:
    """Train a method on the states of the last layer, of the last half, and of all layers (Table 7).

    With ``run``, that run's set-up and its task-0 model; else the set-up of ``infssm run`` (digits). ``overrides``
    such as ``train.epochs=2`` shorten it. All start from one task-0 model per seed; plain training is the yardstick.
    """
    changes = merge(parse_overrides(overrides), {} if data_root is None else {"data": {"root": data_root}})
    by_label: dict[str, list[Result]] = {}
    for seed in seeds:
        configs = _configs(run, method, merge(changes, {"seed": seed, "out": os.fspath(out)}))
        jobs = [Experiment.of(config) for config in configs.values()]
        for label, result in zip(configs, results(gather(InProcess(), jobs, quiet=True)), strict=True):
            by_label.setdefault(label, []).append(result)
    rows: list[dict[str, Any]] = []
    for label, runs in by_label.items():
        table = summarize([result.matrix for result in runs])
        stds = {m: table[m].std for m in _MEASURES}
        spread = {m: None if std is None else 100 * std for m, std in stds.items()}
        rows.append({"blocks": label, **{m: 100 * table[m].mean for m in _MEASURES}, "std": spread})
    shown = "; ".join(f"{r['blocks']}: AA {r['aa']:.1f}, AIA {r['aia']:.1f}, FM {r['fm']:.1f}" for r in rows)
    text = (
        f"{method} over {len(seeds)} seed(s), percent: {shown}. AA is highest with "
        f"{max(rows[1:], key=lambda r: r['aa'])['blocks']}. The paper (Table 7) has AA rise with the number of blocks."
    )
    return Study("blocks", {"method": method, "seeds": list(seeds), "rows": rows}, _blocks_figure(rows), text)


def _configs(run: str | os.PathLike[str] | None, method: str, changes: dict[str, Any]) -> dict[str, RunConfig]:
    """Plain training first, then the method on ever more layers."""
    values, _ = main_job({"model": {}})
    if run is not None:
        directory = RunDirectory.open(run)
        values = directory.config()
        values["train"]["task0"] = str(directory.weights_path(0).resolve())
    base = to_dict(load_config(merge({**values, "method": {"name": "seq"}}, changes)))
    depth = len(find_mixers(create_model(base["model"]["name"], **base["model"]["options"])))
    configs = {"none (seq)": load_config(base)}
    for layers in sorted({1, max(1, depth // 2), depth}):
        label = f"all {depth}" if layers == depth else "last" if layers == 1 else f"last {layers}"
        configs[label] = load_config({**base, "method": {"name": method, "layers": layers}})
    return configs


def _blocks_figure(rows: list[dict[str, Any]]) -> Any:
    figure, panels = axes(3, width=3.2)
    for panel, measure in zip(panels, _MEASURES, strict=True):
        spread = None if rows[0]["std"][measure] is None else [r["std"][measure] for r in rows]
        colours = ["0.6", *["C0"] * (len(rows) - 1)]
        panel.bar(range(len(rows)), [r[measure] for r in rows], 0.6, yerr=spread, capsize=3, color=colours)
        panel.set_xticks(range(len(rows)), [r["blocks"] for r in rows], rotation=20)
        panel.set_title(f"{measure.upper()}, %" + (" (lower is better)" if measure == "fm" else ""))
    panels[1].set_xlabel("regularized blocks")
    return figure


@register_study("penalty-alone")
def penalty_alone(
    *,
    run: str | os.PathLike[str] | None = None,
    kinds: str | Sequence[str] = ("simplified", "aligned", "martin", "output"),
    steps: int = 50,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    weight: float = 1e4,
    data_root: str | None = None,
) -> Study:
    """From a run's task-0 model, train on the penalty only, with each distance, with weight decay and without.

    Reports the drift of Ā and C (root mean square), the distance itself, and the accuracy on task 0, which a penalty
    that holds the old model leaves as they are. `simplified` is the paper's loss with its equality rule: without weight
    decay nothing moves it off the old model, and with it the rule is broken by the first step. Images are those of
    task 1; AdamW at a constant rate.
    """
    trained = TrainedRun.open(run, data_root=data_root)
    if len(trained.setup.stream) < 2:
        raise ConfigError("penalty-alone trains on the images of a second task; this run has one task")
    chosen = choose_kinds(kinds)
    shown = sorted({0, 1, 2, 5, 20, steps} & set(range(steps + 1)))
    rows: list[dict[str, Any]] = []
    for kind, decay in itertools.product(chosen, dict.fromkeys((weight_decay, 0.0))):
        measured = _train(trained, kind, shown, lr=lr, weight_decay=decay, weight=weight)
        rows += [{"kind": kind, "weight_decay": decay, **row} for row in measured]
    data: dict[str, Any] = {"run": str(run), "steps": steps, "lr": lr, "weight": weight, "rows": rows}
    parts = [
        f"{r['kind']}{'' if r['weight_decay'] else ' without weight decay'}: accuracy {r['accuracy']:.1f} %, drift of "
        f"A {r['drift_a']:.2g}, of C {r['drift_c']:.2g}"
        for r in rows
        if r["step"] == steps
    ]
    before = rows[0]["accuracy"]
    text = f"Task-0 accuracy {before:.1f} % before; after {steps} steps on the penalty alone: {'; '.join(parts)}."
    return Study("penalty-alone", data, _penalty_figure(rows), text)


def _train(
    trained: TrainedRun, kind: str, shown: Sequence[int], *, lr: float, weight_decay: float, weight: float
) -> Iterator[dict[str, float]]:
    """Train on the penalty; yield what is measured after the steps of ``shown``."""
    stream = trained.setup.stream
    options: dict[str, Any] = {} if kind == "simplified" else {"distance": kind}
    method = build_method(
        trained.model(0),
        "inf-ssm" if kind == "simplified" else "inf-ssm-exact",
        num_classes=stream.num_classes,
        num_tasks=stream.num_tasks,
        task_sizes=stream.task_sizes,
        weight=weight,
        **options,
    )
    method.begin_task(stream[1])
    optimizer = build_optimizer(decay_groups(method.module, weight_decay))
    set_learning_rate(optimizer, lr)
    probe = trained.images(_IMAGES)
    old = states_of(method.module.eval(), probe)
    loaders = (trained.setup.train_loader(stream[1], epoch) for epoch in itertools.count())
    batches = itertools.chain.from_iterable(loaders)
    for step in range(shown[-1] + 1):
        if step in shown:
            new = states_of(method.module.eval(), probe)
            with torch.no_grad():
                own = _penalty(method, probe) / weight
            yield {
                "step": step,
                "drift_a": _rms(old, new, "a"),
                "drift_c": _rms(old, new, "c"),
                "distance": float(own),
                "accuracy": 100 * trained.accuracy(method, 0),
            }
        if step < shown[-1]:
            method.module.train()
            x = next(batches).x
            train_step(lambda x=x: {"penalty": _penalty(method, x)}, optimizer)  # type: ignore[misc]


def _penalty(method: Method, x: Tensor) -> Tensor:
    """Only the regularizer's term: the forward is run for its states."""
    classes = method.context.current.classes
    y = torch.full((len(x),), classes.start if classes else 0)
    terms = method.loss(Batch(x, y))
    return terms[f"{method.regularizers[0].name}/distance"]


def _rms(old: dict[str, list[StateSpace]], new: dict[str, list[StateSpace]], which: str) -> float:
    """Root mean square of the change of ``a`` or ``c`` over all layers and directions."""
    pairs = (pair for layer in old for pair in zip(old[layer], new[layer], strict=True))
    squares = [(getattr(a, which) - getattr(b, which)).abs().square().mean() for a, b in pairs]
    return float(torch.stack(squares).mean().sqrt())


def _penalty_figure(rows: list[dict[str, Any]]) -> Any:
    figure, panels = axes(3, width=4.0, height=3.6)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    decays = list(dict.fromkeys(row["weight_decay"] for row in rows))
    titles = {"accuracy": "task-0 accuracy, %", "drift_a": "drift of A (rms)", "drift_c": "drift of C (rms)"}
    for panel, (key, title) in zip(panels, titles.items(), strict=True):
        for (colour, kind), decay in itertools.product(enumerate(kinds), decays):
            mine = [r for r in rows if r["kind"] == kind and r["weight_decay"] == decay]
            style: dict[str, Any] = {"color": f"C{colour}", "linestyle": "-" if decay else ":", "marker": "."}
            label = kind if decay == decays[0] else None
            panel.plot([r["step"] for r in mine], [r[key] for r in mine], label=label, **style)
        panel.set_xscale("symlog", linthresh=1)
        panel.set_xticks(sorted({r["step"] for r in rows}), labels=None)
        panel.set(xlabel="step on the penalty alone", title=title)
        panel.xaxis.set_major_formatter("{x:.0f}")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8, title="solid: weight decay; dotted: none", title_fontsize=7)
    return figure
