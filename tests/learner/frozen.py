"""A learner of a tenth of a second: digits, a frozen Vim of one small block with the weights of its seed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from infssm.data import load_dataset
from infssm.learner.config.load import merge
from infssm.learner.learner import Learner

SETTINGS: dict[str, Any] = {
    "data": {"image_size": 8},
    "model": {"options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "d_state": 4}},
    "train": {"task0": "skip", "epochs": 1, "batch_size": 8, "threads": 1, "accelerator": "cpu"},
}


def frozen(method: str = "frozen+gda", /, folder: Path | None = None, **settings: Any) -> Learner:
    """A learner that knows nothing yet."""
    return Learner("vim_nano", method=method, folder=folder, settings=merge(SETTINGS, settings))


@cache
def _digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    dataset = load_dataset("digits")
    return np.stack([np.array(dataset.images.pil(i)) for i in range(len(dataset))]), dataset.labels


def digits(*classes: int, count: int = 10, skip: int = 0) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Pixels ``[n, 8, 8]`` and names of ``count`` images of each class, without the first ``skip`` of it."""
    pixels, labels = _digits()
    rows = [row for c in classes for row in np.flatnonzero(labels == c)[skip : skip + count]]
    return pixels[rows], [f"digit {labels[row]}" for row in rows]
