"""A learner taught in a fraction of a second: digits on the packaged Omniglot weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import infssm
from infssm import Learner

CLASSES = 5


@cache
def _digits() -> tuple[Any, Any]:
    dataset = infssm.load_dataset("digits")
    return dataset.images.pixels[:, 0].numpy(), np.asarray(dataset.labels)


def digits(label: int, start: int, count: int) -> Any:
    """Images uint8 [count, 8, 8] of one digit; spread over the data set, whose writers follow one another."""
    pixels, labels = _digits()
    rows = np.flatnonzero(labels == label)
    return pixels[np.random.default_rng(0).permutation(rows)[start : start + count]]


def taught(folder: Path | None = None, classes: int = CLASSES, count: int = 40, **options: Any) -> Learner:
    """A learner of ``digit 0`` and so on, one lesson each."""
    learner = Learner("vim_nano", weights="omniglot", folder=folder, **options)
    for label in range(classes):
        learner.learn(digits(label, 0, count), f"digit {label}", name=f"lesson of {label}")
    return learner


def digit_files(folder: Path, classes: int, count: int, start: int = 60) -> Path:
    """Images as files, one folder per class; others than those that were taught."""
    for label in range(classes):
        (folder / f"digit {label}").mkdir(parents=True)
        for n, pixels in enumerate(digits(label, start, count)):
            Image.fromarray(pixels).save(folder / f"digit {label}" / f"{n}.png")
    return folder
