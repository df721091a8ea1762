"""The labelled samples that the benchmarks of the learner are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.pages import remembered
from benchmarks.presets import SEEDS
from benchmarks.pretrain import _bent, _ink_boxes
from infssm.data import load_dataset
from infssm.data.recipes import DIGITS


def by_seed(out: Path, name: str, measure: Callable[[int], Any]) -> dict[str, Any]:
    """What is measured with every seed; a file for each."""
    return {str(seed): remembered(out / f"{name} {seed}.json", partial(measure, seed)) for seed in SEEDS}


@dataclass(frozen=True)
class Samples:
    """Samples with their labels.

    Attributes:
        x: uint8 images ``[n, height, width]`` or ``[n, height, width, 3]``, or paths of sounds.
        y: the number of each sample's class, ``[n]``.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]

    def of(self, classes: Sequence[int]) -> Samples:
        return self.at(np.flatnonzero(np.isin(self.y, classes)))

    def at(self, rows: NDArray[np.int64]) -> Samples:
        return Samples(self.x[rows], self.y[rows])

    @property
    def given(self) -> tuple[Any, list[str]]:
        """The two arguments of ``Learner.learn``."""
        return (list(self.x) if self.x.dtype == object else self.x), [str(label) for label in self.y]


def digits(seed: int) -> tuple[Samples, Samples]:
    """Scikit-learn's digits, 1,797 images of 8 pixels a side: a half to teach and a half to test, drawn by the seed."""
    dataset = load_dataset("digits")
    every = Samples(dataset.images.pixels[:, 0].numpy(), dataset.labels)
    order = np.random.default_rng(seed).permutation(len(every.y))
    return every.at(order[: len(order) // 2]), every.at(order[len(order) // 2 :])


def speech(root: Path) -> tuple[Samples, Samples]:
    """Spoken digits of six speakers: 2,700 recordings to teach and 300 to test, as their authors divide them."""
    dataset = load_dataset("speech-digits", str(root))
    sounds = dataset.sequences
    every = Samples(np.array([sounds.root / path for path in sounds.paths], dtype=object), dataset.labels)
    whole = np.arange(len(every.y))
    return every.at(whole[: -dataset.num_test]), every.at(whole[-dataset.num_test :])


def cifar100(root: Path) -> tuple[Samples, Samples]:
    """CIFAR-100: 500 images of each class to teach, 100 to test."""
    with np.load(root / "cifar100.npz") as file:
        return Samples(file["x_train"], file["y_train"]), Samples(file["x_test"], file["y_test"])


def omniglot(root: Path) -> tuple[Samples, Samples]:
    """Handwritten characters as the packaged weights ``omniglot`` saw them: drawers 1 to 15, and 16 to 20 to test."""
    with np.load(root / "omniglot.npz") as file:
        arrays = dict(file)
    parts = []
    for name in ("train", "test"):
        x = torch.from_numpy(arrays[f"x_{name}"]).float()[:, None] / 255
        small = _bent(x, _ink_boxes(x), torch.Generator(), strength=0.0)
        mean, std = DIGITS.mean[0], DIGITS.std[0]
        pixels = (small * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
        parts.append(Samples(pixels[:, 0].numpy(), arrays[f"y_{name}"].astype(np.int64)))
    return parts[0], parts[1]
