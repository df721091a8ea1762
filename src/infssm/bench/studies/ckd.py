"""Centred kernel disparity: which layers' states change from task to task."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from infssm.bench.studies.run import TrainedRun, states_of
from infssm.bench.studies.study import Study, axes, register_study


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
    trained = TrainedRun.open(run, data_root=data_root)
    trained.need_tasks(2)
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
    return Study("ckd", data, _figure(table), text)


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


def _figure(table: list[list[float]]) -> Any:
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
