"""The DeiT recipe through timm: what the paper's released code trains with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from infssm._torchvision import timm
from infssm.data.recipes.base import PerImageRecipe
from infssm.data.recipes.stats import IMAGENET, Stats

if TYPE_CHECKING:
    from PIL.Image import Image

_CROP_SHARE = 0.875


def deit_recipe(
    *, size: int = 224, stats: Stats = IMAGENET, eval_stats: Stats | None = None, augment_val: bool = False
) -> PerImageRecipe:
    """Random resized crop, flip, RandAugment, normalisation and random erasing; resize and centre crop to evaluate.

    Args:
        size: height and width of the output.
        stats: normalisation in training, and fill colour of RandAugment.
        eval_stats: normalisation in evaluation; the same unless given.
        augment_val: see :class:`~infssm.data.recipes.base.Recipe`.
    """
    create = timm("data").create_transform
    train = create(
        size,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
        mean=stats.mean,
        std=stats.std,
    )
    _mend_posterize(train)
    check = eval_stats or stats
    evaluate = create(size, interpolation="bicubic", crop_pct=_CROP_SHARE, mean=check.mean, std=check.std)
    return PerImageRecipe(
        _ToRGB(train),
        _ToRGB(evaluate),
        size=size,
        raw_size=int(size / _CROP_SHARE),
        eval_stats=check,
        augment_val=augment_val,
    )


def _mend_posterize(transform: Any) -> None:
    """Let RandAugment posterize to 0 bits, which magnitude 10 asks for and newer Pillow refuses."""
    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize


def _posterize(image: Image, bits: int, **_: object) -> Image:
    """Keep the highest ``bits`` of every channel; none left is black, as older Pillow has it."""
    from PIL import Image as pil
    from PIL import ImageOps

    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else pil.new(image.mode, image.size)


class _ToRGB:
    """A transform that grey images can pass too (a class, so that worker processes can receive it)."""

    def __init__(self, transform: Callable[[Image], Tensor]) -> None:
        self.transform = transform

    def __call__(self, image: Image) -> Tensor:
        return self.transform(image.convert("RGB"))
