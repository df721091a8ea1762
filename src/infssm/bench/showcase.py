"""Created by the main job for a first try: a learner that knows the digits, and images of a sign that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infssm.learner.learner import Learner
from infssm.learner.result import Result
from infssm.learner.store.versions import Versions

_METHOD = "frozen+gda"
_IMAGES = 20


def leave_learner(results: Sequence[Result], folder: Path) -> tuple[Path, Path, Path] | None:
    """A learner of the first run with a frozen backbone, a folder of images of plus signs, and one image to classify.

    A learner that is there already stays as it is. None if no such run is among the results.
    """
    runs = [result for result in results if result.config.method.name == _METHOD]
    if not runs:
        return None
    learner, signs, image = folder / "learner", folder / "signs", folder / "plus.png"
    if not Versions(learner).exists:
        Learner.load(runs[0].path).save(learner)
    from PIL import Image

    rng = np.random.default_rng(0)
    (signs / "plus").mkdir(parents=True, exist_ok=True)
    for path in [*(signs / "plus" / f"{i}.png" for i in range(_IMAGES)), image]:
        Image.fromarray(_plus(rng)).save(path)
    return learner, signs, image


def _plus(rng: np.random.Generator) -> NDArray[np.uint8]:
    """A plus sign, bright on black, uint8 [8, 8]: two strokes of random place, length and strength."""
    ink = np.zeros((8, 8))
    row, column = rng.integers(3, 5, 2)
    for place, across in ((row, False), (column, True)):
        start, end = rng.integers(0, 2), rng.integers(7, 9)
        stroke = ink.T if across else ink
        stroke[place, start:end] += rng.uniform(170, 255)
        stroke[place + rng.choice([-1, 1]), start + 1 : end - 1] += rng.uniform(0, 110)
    return np.clip(ink + rng.normal(0, 8, ink.shape) * (ink > 0), 0, 255).astype(np.uint8)
