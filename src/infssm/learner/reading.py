"""Convert files, arrays and images to model input, by the same steps as in evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from infssm.data import FileImages, ImageFacts, PerImageRecipe, Recipe, SequenceFacts
from infssm.data.audio import read_sound
from infssm.data.images import to_raw, to_rgb
from infssm.data.npz import read_npz
from infssm.data.sets.text import BYTES
from infssm.data.spectra import log_energies, mel_bank
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SampleLike: TypeAlias = "str | os.PathLike[str] | Image | np.ndarray[Any, Any] | Tensor"
"""A file, a PIL image, uint8 pixels ``[height, width]`` or ``[height, width, 3]``, or a series ``[time, width]``."""


def model_input(image: SampleLike, facts: ImageFacts, recipe: Recipe) -> Tensor:
    """One image to float32 ``[channels, size, size]``: what evaluation makes of the same image in the data set."""
    opened = open_image(image, facts)
    if isinstance(recipe, PerImageRecipe):
        return recipe.eval_image(opened)
    if opened.size == (facts.width, facts.height):  # the size of the data, which the recipe resizes itself
        pixels = torch.from_numpy(np.array(opened))
        raw = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    else:
        raw = to_raw(opened, recipe.raw_size)
    return recipe.eval(raw[None])[0]


def open_image(image: SampleLike, facts: ImageFacts) -> Image:
    """An image as RGB, or grey where the training images were."""
    from PIL import Image as pil

    if isinstance(image, (str, os.PathLike)):
        path = Path(image)
        if not path.is_file():
            raise DataError(f"there is no image file {path}")
        upright = FileImages(path.parent, (path.name,)).pil(0)  # turned already, and its EXIF data still say otherwise
    elif isinstance(image, (np.ndarray, Tensor)):
        pixels = image.cpu().numpy() if isinstance(image, Tensor) else image
        if pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
            raise DataError(
                "an image given as numbers must be uint8 [height, width] or [height, width, 1 or 3], got "
                f"{pixels.dtype} {list(pixels.shape)}"
            )
        upright = to_rgb(pil.fromarray(np.ascontiguousarray(pixels)))
    elif isinstance(image, pil.Image):
        upright = to_rgb(image)
    else:
        raise DataError(f"an image is a path, a PIL image, an array or a tensor, got {type(image).__name__}")
    return upright if facts.channels == 3 else upright.convert("L")


def sequence_input(sample: SampleLike, facts: SequenceFacts) -> Tensor:
    """One sound, series or list of tokens as model input, float32 ``[time, width]`` or int64 ``[time]``.

    Values that are not finite are refused: the model would answer all the same.
    """
    # An array [time, bands] holds log energies already.
    is_features = facts.bands is not None and isinstance(sample, (np.ndarray, Tensor)) and sample.ndim == 2
    if facts.rate is not None and not is_features:
        sound = sound_input(sample, facts)
        if facts.bands is None:
            return sound[:, None]
        return log_energies(sound, facts.rate, mel_bank(facts.bands, facts.rate))
    if isinstance(sample, (str, os.PathLike)):
        (sample,) = read_series(Path(sample)).values()
    if not isinstance(sample, (np.ndarray, Tensor)):
        raise DataError(f"a series is an array, a tensor or a file; got {type(sample).__name__}")
    values = torch.as_tensor(np.array(sample) if isinstance(sample, np.ndarray) else sample)
    if facts.kind == "tokens":
        if values.ndim != 1 or not len(values) or values.is_floating_point():
            raise DataError(f"tokens must be integers [time], got {values.dtype} {list(values.shape)}")
        if values.min() < 0 or values.max() >= facts.width:
            raise DataError(f"tokens must be from 0 to {facts.width - 1}, got {values.min()} to {values.max()}")
        return values.long()
    values = values.float()
    if values.ndim != 2 or values.shape[1] != facts.width or not len(values):
        raise DataError(f"a series must be numbers [time, {facts.width}], got {list(values.shape)}")
    return _finite(values)


def sound_input(sample: SampleLike, facts: SequenceFacts) -> Tensor:
    """A wav file, or a waveform ``[samples]`` or ``[samples, 1]`` from -1 to 1, as float32 ``[samples]``."""
    assert facts.rate is not None
    if isinstance(sample, (str, os.PathLike)):
        return _finite(torch.from_numpy(read_sound(Path(sample), facts.rate)))
    if not isinstance(sample, (np.ndarray, Tensor)):
        raise DataError(f"a sound is a wav file, an array or a tensor; got {type(sample).__name__}")
    sound = torch.as_tensor(sample, dtype=torch.float32)
    sound = sound.squeeze(-1) if sound.ndim == 2 else sound
    if sound.ndim != 1 or not len(sound):
        raise DataError(f"a sound must be numbers [samples], got {list(sound.shape)}")
    return _finite(sound)


def token_input(prompt: str | Tensor, facts: SequenceFacts, tokenizer: Any = None) -> Tensor:
    """Text, or ids ``[tokens]`` or ``[batch, tokens]``, as ids int64 ``[batch, tokens]`` of a language model.

    ``tokenizer`` is that of the training text; None if its bytes are the tokens.
    """
    if not isinstance(prompt, str):
        flat = sequence_input(prompt.flatten(), facts)
        return flat.view(prompt.shape) if prompt.ndim == 2 else flat[None]
    if tokenizer is None and facts.width != BYTES:
        raise ConfigError(f"the model has {facts.width} tokens of a tokenizer: encode the text, and give ids [tokens]")
    ids = list(prompt.encode()) if tokenizer is None else tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise DataError("the prompt is empty: give at least one token")
    return sequence_input(torch.tensor(ids), facts)[None]


def _finite(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise DataError(f"{bad} of {values.numel():,} values are NaN or infinite: replace them or leave the sample out")
    return values


def read_series(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The series of a file by name: one in an ``.npy`` or ``.csv``, all of ``x`` (and ``lengths``) in an ``.npz``.

    An ``.npy`` holds ``[time, width]``, a ``.csv`` a step per line without a heading, an ``.npz`` ``x: [n, time,
    width]`` as for training.
    """
    try:
        if path.suffix == ".npz":
            stored = read_npz(path, ("x",), ("lengths",))
            x, lengths = stored["x"], stored.get("lengths")
            if x.ndim < 2 or (lengths is not None and lengths.shape != x.shape[:1]):
                raise DataError(f"{path}: x must be [n, time, width], got {list(x.shape)}")
            cut = [x[i] if lengths is None else x[i, : int(lengths[i])] for i in range(len(x))]
            return {f"{path}[{i}]": values for i, values in enumerate(cut)}
        if path.suffix == ".npy":
            return {str(path): np.load(path, mmap_mode="r", allow_pickle=False)}
        if path.suffix == ".csv":
            return {str(path): np.loadtxt(path, delimiter=",", ndmin=2)}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    raise DataError(f"{path} is not a series: give an .npy or .csv [time, width], or an .npz with x [n, time, width]")
