"""Studies of the states along a run: how far they move from the first model, and in which layers they change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infssm.bench.studies.study import Study, TrainedRun, axes, choose_kinds, register_study, states_of
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
    trained = TrainedRun.open(run, data_root=data_root, tasks=2)
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
    return Study("drift", data, _drift_figure(table, list(old)), text)


@torch.no_grad()
def _mean_distance(old: Sequence[StateSpace], new: Sequence[StateSpace], kind: str) -> float:
    options: dict[str, Any] = {"equality": "off"} if kind == "simplified" else {}
    pairs = ((a.without_padding(), b.without_padding()) for a, b in zip(old, new, strict=True))
    values = [
        distance(a, b, kind=kind, soft_normalize=True, validate=False, **options).double().mean() for a, b in pairs
    ]
    return float(torch.stack(values).mean())


def _drift_figure(table: dict[str, list[list[float]]], layers: list[str]) -> Any:
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


@register_study("ckd")
def ckd(
    *,
    run: str | os.PathLike[str] | None = None,
    images: int = 512,
    batch_size: int = 64,
    data_root: str | None = None,
) -> Study:
    """1 - linear CKA of the states [A, C] of consecutive task models of a run, layer by layer.

    Rows are tokens of the first ``images`` test images of task 0, columns the 2n states; scan directions are averaged.
    """
    trained = TrainedRun.open(run, data_root=data_root, tasks=2)
    x = trained.images(images)
    table: list[list[float]] = []
    old = trained.model(0)
    layers = list(states_of(old, x[:1]))
    for task in range(1, trained.tasks):
        new = trained.model(task)
        table.append(_disparities(old, new, x, batch_size))
        old = new
    data: dict[str, Any] = {
        "run": str(run),
        "method": trained.config.method.name,
        "images": len(x),
        "layers": layers,
        "ckd": table,
        "transitions": [f"{t - 1}->{t}" for t in range(1, trained.tasks)],
    }
    means = torch.tensor(table, dtype=torch.float64).mean(0)
    most, least, half = int(means.argmax()), int(means.argmin()), len(means) // 2
    text = (
        f"{data['method']}: mean disparity over {len(table)} transition(s) is {float(means.mean()):.3g}; largest "
        f"in layer {most + 1} of {len(means)} ({means[most]:.3g}), smallest in layer {least + 1} ({means[least]:.3g}); "
        f"first half of the layers {float(means[:half].mean()):.3g}, second half {float(means[half:].mean()):.3g}."
    )
    return Study("ckd", data, _ckd_figure(table), text)


class LinearCKA:
    """Linear centred kernel alignment of two representations of the same rows, accumulated in float64."""

    def __init__(self) -> None:
        self._rows = 0
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows: ``x: [m, p]``, ``y: [m, q]``."""
        x, y = x.double(), y.double()
        sums = [x.sum(0), y.sum(0), x.T @ x, y.T @ y, x.T @ y]
        self._sums = sums if not self._rows else [a + b for a, b in zip(self._sums, sums, strict=True)]
        self._rows += len(x)

    def value(self) -> float:
        """``|XᵀY|² / (|XᵀX| |YᵀY|)`` of the centred matrices; 1 where neither varies."""
        mean_x, mean_y, xx, yy, xy = self._sums
        xx = xx - torch.outer(mean_x, mean_x) / self._rows
        yy = yy - torch.outer(mean_y, mean_y) / self._rows
        xy = xy - torch.outer(mean_x, mean_y) / self._rows
        norm = xx.norm() * yy.norm()
        return float(xy.square().sum() / norm) if norm > 0 else float(xx.norm() == yy.norm())


def _disparities(old: nn.Module, new: nn.Module, x: Tensor, batch_size: int) -> list[float]:
    """1 - CKA per layer, mean over directions; the rows are the states [A, C] of all tokens: [tokens, 2n]."""
    alignments: dict[str, list[LinearCKA]] = {}
    for part in torch.split(x, batch_size):
        before, after = states_of(old, part), states_of(new, part)
        for layer, spaces in before.items():
            for direction, pair in enumerate(zip(spaces, after[layer], strict=True)):
                alignment = alignments.setdefault(layer, [LinearCKA() for _ in spaces])[direction]
                alignment.add(*(torch.cat([_real(space.a), _real(space.c)], dim=-1) for space in pair))
    return [1 - sum(a.value() for a in layer) / len(layer) for layer in alignments.values()]


def _real(states: Tensor) -> Tensor:
    """States of all tokens as rows, complex ones as their real and imaginary part."""
    return (torch.view_as_real(states).flatten(-2) if states.is_complex() else states).flatten(0, -2)


def _ckd_figure(table: list[list[float]]) -> Any:
    figure, (panel,) = axes(1, width=6)
    values = torch.tensor(table, dtype=torch.float64)
    layers = range(1, values.shape[1] + 1)
    panel.plot(layers, values.mean(0), marker="o", label="mean over transitions")
    if len(values) > 1:
        panel.fill_between(layers, values.amin(0), values.amax(0), alpha=0.2, label="smallest to largest")
    panel.set(xlabel="layer", ylabel="1 - CKA of [A, C]")
    panel.set_ylim(bottom=0)
    panel.set_xticks(list(layers) if len(layers) <= 24 else [1, *range(8, len(layers) + 1, 8)])
    panel.legend(frameon=False)
    return figure
