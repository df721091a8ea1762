"""How far the states of each layer move from those of task 0's model along a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from infssm.bench.studies.run import TrainedRun, states_of
from infssm.bench.studies.study import Study, axes, choose_kinds, register_study
from infssm.ssm import StateSpace, distance


@register_study("drift")
def drift(
    *,
    run: str | os.PathLike[str] | None = None,
    kinds: str | Sequence[str] = ("output", "martin", "aligned", "simplified"),
    images: int = 32,
    data_root: str | None = None,
) -> Study:
    """Distance of each layer's states from task 0's model after every task of a run.

    Mean over tokens and directions on the first ``images`` test images of task 0. kinds: ``"all"`` or some of the
    distances; `simplified` without its equality rule, since it is not 0 between equal systems.
    """
    trained = TrainedRun.open(run, data_root=data_root)
    trained.need_tasks(2)
    chosen = choose_kinds(kinds)
    x = trained.images(images)
    old = states_of(trained.model(0), x)
    table: dict[str, list[list[float]]] = {kind: [] for kind in chosen}
    for task in range(trained.tasks):
        new = states_of(trained.model(task), x)
        for kind in chosen:
            table[kind].append([_mean_distance(old[layer], new[layer], kind) for layer in old])
    data: dict[str, Any] = {
        "run": str(run),
        "method": trained.config.method.name,
        "images": len(x),
        "layers": list(old),
        "distance_after_task": table,
    }
    parts = []
    for kind, rows in table.items():
        last = rows[-1]
        most = max(range(len(last)), key=last.__getitem__)
        at_start = f"; {sum(rows[0]) / len(last):.2g} already between equal models" if sum(rows[0]) > 1e-9 else ""
        parts.append(
            f"{kind} {sum(last) / len(last):.2g} (most in layer {most + 1} of {len(last)}: {last[most]:.2g}{at_start})"
        )
    text = (
        f"{data['method']}, mean distance of the states on {len(x)} images of task 0 after {trained.tasks - 1} further "
        f"task(s): {'; '.join(parts)}."
    )
    return Study("drift", data, _figure(table, list(old)), text)


@torch.no_grad()
def _mean_distance(old: Sequence[StateSpace], new: Sequence[StateSpace], kind: str) -> float:
    options: dict[str, Any] = {"equality": "off"} if kind == "simplified" else {}
    pairs = ((a.without_padding(), b.without_padding()) for a, b in zip(old, new, strict=True))
    values = [
        distance(a, b, kind=kind, soft_normalize=True, validate=False, **options).double().mean() for a, b in pairs
    ]
    return float(torch.stack(values).mean())


def _figure(table: dict[str, list[list[float]]], layers: list[str]) -> Any:
    import matplotlib as mpl

    columns = min(4, len(table))
    figure, panels = axes(columns, width=3.4, height=3.0, rows=-(-len(table) // columns))
    colours = mpl.colormaps["viridis"].resampled(max(len(layers), 2))
    shown = set(range(len(layers))) if len(layers) <= 6 else {0, len(layers) // 2, len(layers) - 1}
    for panel, (kind, rows) in zip(panels, table.items(), strict=False):
        for i in range(len(layers)):
            label = f"layer {i + 1}" if i in shown else None
            panel.plot(range(len(rows)), [row[i] for row in rows], color=colours(i), marker=".", label=label)
        panel.set(title=kind, xlabel="after task")
        panel.set_xticks(range(len(rows)), [str(task + 1) for task in range(len(rows))])
        panel.ticklabel_format(axis="y", scilimits=(-2, 3))
    panels[0].set_ylabel("distance from the first task's model")
    panels[0].legend(frameon=False, fontsize=8)
    for panel in panels[len(table) :]:
        panel.set_visible(False)
    return figure
