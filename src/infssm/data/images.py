"""Where the pixels of a data set live: one array in memory, or files on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from infssm._optional import require
from infssm.data.facts import ExportedInput, Normalize, SampleFacts, SampleLike, resizing_graph
from infssm.data.files import DecodedStore, Files, digest, open_store, require_regular
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from infssm.data.dataset import Dataset
    from infssm.data.recipes import Recipe

HEIC = frozenset({".heic", ".heif"})
"""Endings of the images that need pillow-heif."""
HEIC_INSTALL = "pip install pillow-heif"
_UPRIGHT = (0, 3, 1, 5, 4, 6, 2)
"""Pillow's transposition that makes each of the EXIF orientations 2 to 8 upright."""
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"}) | HEIC
"""Endings of the files that are read as images."""


@dataclass(frozen=True)
class ImageFacts(SampleFacts, kind="images"):
    """What the images of a data set are like; see :class:`~infssm.data.facts.SampleFacts`.

    Attributes:
        name: name the data set was loaded by.
        channels: colour channels, 1 or 3.
        height: pixels, where all images have one size; None for files of any size.
        width: like ``height``.
    """

    kind = "images"
    stored_as = "images"
    suffixes = SUFFIXES
    name: str
    channels: int
    height: int | None = None
    width: int | None = None

    @property
    def size(self) -> int:
        """The channels."""
        return self.channels

    def open(self, image: SampleLike) -> Image:
        """An image as RGB, or grey where the training images were."""
        from PIL import Image as pil

        if isinstance(image, (str, os.PathLike)):
            path = Path(image)
            if not path.is_file():
                raise DataError(f"there is no image file {path}")
            upright = FileImages(path.parent, (path.name,)).pil(0)
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
        return upright if self.channels == 3 else upright.convert("L")

    def read(self, sample: SampleLike, recipe: Recipe | None = None) -> Tensor:
        """Float32 ``[channels, size, size]``: what evaluation makes of the same image in the data set."""
        assert recipe is not None
        image = self.open(sample)
        if image.size == (self.width, self.height):  # as in the data, whose images the recipe resizes by itself
            return recipe.eval(from_pil(image)[None])[0]
        return recipe.eval_image(image)

    def raw(self, sample: SampleLike) -> Tensor:
        """Uint8 ``[height, width]`` or ``[height, width, 3]``."""
        return torch.from_numpy(np.array(self.open(sample)))

    def fit(self, dataset: Dataset, recipe: Recipe | None) -> Dataset:
        """With as many colours, and where the size differs in the recipe's raw size."""
        if not isinstance(dataset.facts, ImageFacts):
            raise DataError(f"the learner knows images, and {dataset.name} holds {dataset.facts.kind}")
        if dataset.facts == replace(self, name=dataset.name):
            return dataset
        size = self.height if recipe is None else recipe.raw_size
        assert size is not None  # a recipe is missing only at the first lesson, whose size is that of the weights
        opened = [self.open(dataset.images.pil(index)) for index in range(len(dataset))]
        return replace(dataset, samples=ArrayImages(torch.stack([to_raw(image, size) for image in opened])))

    def exported(self, recipe: Recipe | None) -> ExportedInput:
        """Images of any size, compared in three of them."""
        assert recipe is not None
        size, mode = recipe.size, "RGB" if self.channels == 3 else "L"
        draw = torch.Generator().manual_seed(1)
        shapes = ((size, size), (size + 7, 2 * size + 3), (self.height or 2 * size, self.width or 2 * size))
        return ExportedInput(
            "image",
            torch.randint(256, (2, self.channels, size, size), dtype=torch.uint8, generator=draw),
            f'image = numpy.asarray(ImageOps.exif_transpose(Image.open("photo.jpg")).convert("{mode}"))',
            "\nfrom PIL import Image, ImageOps",
            {"mode": mode, "size": size},
            Normalize(recipe.eval_stats),
            resizing_graph(self, recipe),
            tuple(torch.randint(256, (3, *s, self.channels), dtype=torch.uint8, generator=draw) for s in shapes),
        )


class Images(Protocol):
    """An indexed collection of images."""

    def __len__(self) -> int: ...

    def pil(self, index: int, at_least: int | None = None) -> Image:
        """Image ``index`` as a PIL image, in its own size, or a smaller one with ``at_least`` so many pixels a side."""

    def raw(self, indices: Sequence[int], size: int) -> Tensor:
        """Images as uint8 [n, channels, height, width], all of one size."""

    def facts(self, name: str) -> ImageFacts:
        """Facts about the images of the data set ``name`` that a model needs."""

    def fingerprint(self) -> str:
        """Digest that changes when images are added, removed, reordered or altered."""


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images of one size in memory.

    Attributes:
        pixels: uint8 [n, channels, height, width].
    """

    pixels: Tensor

    @classmethod
    def from_numpy(cls, pixels: np.ndarray[Any, Any]) -> ArrayImages:
        """Build from uint8 [n, height, width] or [n, height, width, channels]."""
        if pixels.dtype != np.uint8 or not (pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[-1] in (1, 3))):
            raise DataError(
                "images must be uint8 arrays [n, height, width] or [n, height, width, 1 or 3], "
                f"got {pixels.dtype} {list(pixels.shape)}"
            )
        if 0 in pixels.shape[1:]:
            raise DataError(f"images must have pixels, got {list(pixels.shape)}")
        planes = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
        return cls(torch.from_numpy(np.ascontiguousarray(planes)))

    def __len__(self) -> int:
        return len(self.pixels)

    def pil(self, index: int, at_least: int | None = None) -> Image:  # noqa: ARG002 - there is nothing to decode
        """Image ``index`` as an RGB or grey PIL image, in its own size."""
        return to_pil(self.pixels[index])

    def raw(self, indices: Sequence[int], size: int) -> Tensor:  # noqa: ARG002 - arrays keep the size they have
        """Images as uint8 [n, channels, height, width]; arrays keep the size they have."""
        return self.pixels[torch.as_tensor(indices)]

    def facts(self, name: str) -> ImageFacts:
        """See :class:`Images`."""
        return ImageFacts(name, *map(int, self.pixels.shape[1:]))

    def fingerprint(self) -> str:
        """Digest of the shape and of all pixels."""
        return digest([str(tuple(self.pixels.shape)), self.pixels.contiguous().numpy().data])


@dataclass(frozen=True, eq=False)
class FileImages(Files):
    """Images in files of any size, read as upright RGB when asked for."""

    word = "image"
    _stores: dict[int, DecodedStore | None] = field(default_factory=dict, init=False, repr=False)

    def pil(self, index: int, at_least: int | None = None) -> Image:
        """Image ``index`` as an RGB PIL image; DataError names a file that cannot be read.

        A large JPEG may be decoded at a half, a quarter or an eighth, as long as its short side keeps ``at_least`` so
        many pixels, which takes a fraction of the time.
        """
        with self._opened(index) as image:
            if at_least is not None:
                image.draft(None, (at_least, at_least))
            return to_rgb(image)

    def size_of(self, index: int) -> tuple[int, int] | None:
        """Width and height of image ``index`` by its header, without decoding it; None if it cannot be read."""
        try:
            with self._opened(index) as image:
                width, height = image.size
                return (height, width) if _orientation(image) >= 5 else (width, height)
        except DataError:
            return None

    def why_unreadable(self, index: int) -> str | None:
        """Why image ``index`` cannot be read; None when it can. Decodes at low resolution, to the last byte."""
        try:
            with self._opened(index) as image:
                _require_known_white(image)
                image.draft("RGB", (1, 1))
                image.load()
        except DataError as error:
            return str(error.__cause__)
        return None

    @contextlib.contextmanager
    def _opened(self, index: int) -> Iterator[Image]:
        from PIL import Image as pil

        path = self.root / self.paths[index]
        try:
            if path.suffix.lower() in HEIC:
                require("pillow_heif", install=f"HEIC images need it: {HEIC_INSTALL}").register_heif_opener()
            require_regular(path)
            with pil.open(path) as image:
                yield image
        except ConfigError:
            raise
        except Exception as error:  # Pillow's decoders raise almost anything on damaged files
            raise DataError(f"cannot read the image {path}: {error}; replace or delete it") from error

    def raw(self, indices: Sequence[int], size: int) -> Tensor:
        """Images with the short side resized to ``size``, cut to the central square: uint8 [n, 3, size, size].

        Each is decoded once, then kept under the cache root.
        """
        store, images = self.store(size), []
        for index in map(int, indices):
            raw = None if store is None else store.get(index)
            if raw is None:
                raw = to_raw(self.pil(index, 2 * size), size)
                if store is not None:
                    store.put(index, raw)
            images.append(raw)
        return torch.stack(images)

    def facts(self, name: str) -> ImageFacts:
        """See :class:`Images`; files may have any size and are read as RGB."""
        return ImageFacts(name, 3)

    def store(self, size: int) -> DecodedStore | None:
        """Where images of this size are kept; None if they would not fit or the cache cannot be written."""
        if size not in self._stores:
            self._stores[size] = open_store(self.fingerprint(), len(self), size)
        return self._stores[size]


def _orientation(image: Image) -> int:
    """How the camera was held, 1 to 8 as in the EXIF standard; 1 (upright) where the image does not tell."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # damaged EXIF data: the pixels can be read nevertheless
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def to_rgb(image: Image) -> Image:
    """An opened image as RGB with 8 bits per channel, turned as its EXIF orientation says; 16 bits are scaled."""
    from PIL import Image as pil

    _require_known_white(image)
    orientation = _orientation(image)
    if _is_sixteen_bit(image):  # Pillow would clip at 255
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = pil.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    image = image.convert("RGB")
    return image if orientation == 1 else image.transpose(pil.Transpose(_UPRIGHT[orientation - 2]))


def _is_sixteen_bit(image: Image) -> bool:
    """Whether grey levels run to 65,535; PNG and PGM files of 16 bits come as mode I from some versions of Pillow."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _require_known_white(image: Image) -> None:
    if image.mode in ("I", "F") and not _is_sixteen_bit(image):
        raise ValueError(f"32-bit pixels (mode {image.mode}) do not say which value is white: save 8 or 16 bits")


def to_pil(raw: Tensor) -> Image:
    """uint8 [channels, height, width] to a PIL image."""
    from PIL import Image as pil

    array = raw.permute(1, 2, 0).numpy()
    return pil.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def from_pil(image: Image) -> Tensor:
    """A grey or RGB PIL image to uint8 [channels, height, width]."""
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def to_raw(image: Image, size: int) -> Tensor:
    """PIL image to uint8 [channels, size, size]: bicubic resize of the short side, then the central square."""
    from PIL import Image as pil

    width, height = image.size
    scale = size / min(width, height)
    new = (max(size, round(width * scale)), max(size, round(height * scale)))
    if new != image.size:
        image = image.resize(new, pil.Resampling.BICUBIC)
    left, top = (new[0] - size) // 2, (new[1] - size) // 2
    return from_pil(image.crop((left, top, left + size, top + size)))
