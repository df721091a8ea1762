"""Generated waves: a noisy wave of one of four shapes, whose frequency is to be told. Nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infssm.data.dataset import Dataset
from infssm.data.registry import register_dataset
from infssm.data.sequences import MeasuredSeries

_SHAPES = ("sine", "square", "pulse", "chirp")
_LOWEST, _OCTAVES = 1.5, 2.0
"""Periods per series of the slowest wave, and how many times the fastest doubles them."""


@register_dataset("waves", summary="generated waves of four shapes: tell the frequency, a number (regression)")
def waves(root: Path, *, per_shape: int = 400, steps: int = 48, noise: float = 0.1) -> Dataset:  # noqa: ARG001
    """Shapes are the domains; the target is the frequency in octaves, uniform and standardised to variance 1.

    A quarter of the waves of each shape are the test set. Phase and amplitude are drawn, too.
    """
    rng = np.random.default_rng(0)
    shape = np.arange(4 * per_shape) % 4
    octave = rng.uniform(0, 1, len(shape))
    time = np.arange(steps) / steps
    turns = _LOWEST * 2 ** (_OCTAVES * octave)[:, None] * time
    turns = np.where(shape[:, None] == 3, turns * (0.5 + time), turns) + rng.uniform(0, 1, (len(shape), 1))
    sine = np.sin(2 * np.pi * turns)
    values = np.select(
        [shape[:, None] == 1, shape[:, None] == 2], [np.sign(sine), np.where(turns % 1 < 0.15, 1.0, -0.2)], sine
    )
    values = values * rng.uniform(0.5, 1.5, (len(shape), 1)) + noise * rng.normal(size=values.shape)
    return Dataset(
        "waves",
        ("frequency",),
        MeasuredSeries(values[:, :, None], (octave - 0.5) * np.sqrt(12)),
        np.zeros(len(shape), dtype=np.int64),
        num_test=4 * (per_shape // 4),
        stratified=True,
        domains=_SHAPES,
        domain_of=shape,
        domain_word="shape",
    )
