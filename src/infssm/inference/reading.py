"""From whatever people call an image to model input, by the same steps as in evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from infssm.data import FileImages, ImageFacts, PerImageRecipe, Recipe
from infssm.data.images import to_raw, to_rgb
from infssm.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

ImageLike: TypeAlias = "str | os.PathLike[str] | Image | np.ndarray[Any, Any] | Tensor"
"""A file, a PIL image, or uint8 pixels ``[height, width]`` or ``[height, width, channels]``."""


def model_input(image: ImageLike, facts: ImageFacts, recipe: Recipe) -> Tensor:
    """One image to float32 ``[channels, size, size]``: what evaluation makes of the same image in the data set."""
    opened = _opened(image)
    opened = to_rgb(opened) if facts.channels == 3 else to_rgb(opened).convert("L")
    if isinstance(recipe, PerImageRecipe):
        return recipe.eval_image(opened)
    if opened.size == (facts.width, facts.height):  # the size the data had, which the recipe resizes by itself
        pixels = torch.from_numpy(np.array(opened))
        raw = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    else:
        raw = to_raw(opened, recipe.raw_size)
    return recipe.eval(raw[None])[0]


def _opened(image: ImageLike) -> Image:
    from PIL import Image as pil

    if isinstance(image, pil.Image):
        return image
    if isinstance(image, (str, os.PathLike)):
        path = Path(image)
        if not path.is_file():
            raise DataError(f"there is no image file {path}")
        return FileImages(path.parent, (path.name,)).pil(0)
    if isinstance(image, (np.ndarray, Tensor)):
        pixels = image.cpu().numpy() if isinstance(image, Tensor) else image
        if pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        if pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
            return pil.fromarray(np.ascontiguousarray(pixels))
        raise DataError(
            "an image given as numbers must be uint8 [height, width] or [height, width, 1 or 3], got "
            f"{pixels.dtype} {list(pixels.shape)}"
        )
    raise DataError(f"an image is a path, a PIL image, an array or a tensor, got {type(image).__name__}")
