"""scikit-learn's handwritten digits: 1,797 grey images of 8 x 8, inside the package, nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infssm.data.dataset import Dataset
from infssm.data.images import ArrayImages
from infssm.data.registry import register_dataset
from infssm.errors import ConfigError


@register_dataset("digits", summary="handwritten digits, 8x8 grey, embedded (scikit-learn)", classes=10, images=1797)
def digits(root: Path) -> Dataset:  # noqa: ARG001 - every loader takes the root
    """Digits at their own size, one channel; grey levels 0..16 scaled to 0..255."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError("the digits need scikit-learn: pip install 'infssm[bench]'") from error
    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return Dataset("digits", tuple(str(d) for d in range(10)), ArrayImages.from_numpy(pixels), bunch.target)
