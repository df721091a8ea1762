"""From whatever people call an image, a sound or a series to model input, by the same steps as in evaluation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from infssm._batch import inputs_of
from infssm.data import FileImages, ImageFacts, PerImageRecipe, Recipe, SequenceFacts
from infssm.data.audio import read_sound
from infssm.data.images import to_raw, to_rgb
from infssm.data.sequence_loader import pad
from infssm.data.spectra import log_energies, mel_bank
from infssm.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SampleLike: TypeAlias = "str | os.PathLike[str] | Image | np.ndarray[Any, Any] | Tensor"
"""An image, the file of a sound, or a series of numbers ``[time, width]``."""
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


def sequence_input(sample: SampleLike, facts: SequenceFacts) -> Tensor:
    """One sound or series to float32 ``[time, width]``: what evaluation makes of the same one in the data set."""
    if isinstance(sample, (str, os.PathLike)):
        if facts.rate is None:
            raise DataError(f"the model was trained on {facts.kind}: give numbers [time, {facts.width}], not a file")
        sound = torch.from_numpy(read_sound(Path(sample), facts.rate))
        if facts.bands is None:
            return sound[:, None]
        return log_energies(sound, facts.rate, mel_bank(facts.bands, facts.rate))
    if not isinstance(sample, (np.ndarray, Tensor)):
        raise DataError(f"a series is an array or a tensor, a sound a wav file; got {type(sample).__name__}")
    values = torch.as_tensor(sample, dtype=torch.float32)
    if values.ndim != 2 or values.shape[1] != facts.width or not len(values):
        raise DataError(f"a series must be numbers [time, {facts.width}], got {list(values.shape)}")
    return values


def padded(sequences: Sequence[Tensor]) -> Tensor | Mapping[str, Tensor]:
    """Sequences ``[time, width]`` as model input, with a mask where their lengths differ."""
    return inputs_of(*pad(sequences))


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
