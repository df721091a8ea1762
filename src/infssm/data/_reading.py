"""Getting the images of a batch: sliced from an array, or read one by one, in worker processes if wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from infssm._memory import cores_here
from infssm.data.images import ArrayImages, FileImages, Images, to_raw
from infssm.data.recipes.base import PerImageRecipe, Recipe
from infssm.errors import DataError

_DETAIL = 4
"""Pixels kept per pixel of output, a side: the smallest random crop (8 % of the area) is never enlarged."""
_WORTH = 256
"""Images for which starting processes pays."""
_MOST = 8

_Item = tuple[Tensor | None, Tensor | None]


def read_images(
    images: Images,
    recipe: Recipe,
    indices: Tensor,
    draws: Tensor | None,
    batches: Sequence[Tensor],
    *,
    with_raw: bool,
    workers: int | None,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Model input and, if wanted, raw images of each batch.

    Args:
        images: where images come from.
        recipe: how they are transformed.
        indices: int64 [n] data set index of every slot.
        draws: [n, ...] random numbers of every slot; None for the evaluation transform.
        batches: int64 slots of each batch.
        with_raw: whether to return raw images too.
        workers: processes that read and transform single images; None: as many as there are cores, where there is
            enough to do.
    """
    if isinstance(images, ArrayImages) and not isinstance(recipe, PerImageRecipe):
        for slots in batches:
            raw = images.pixels[indices[slots]]
            yield _transform(recipe, raw, draws, slots), raw if with_raw else None
        return
    source = _Single(images, recipe, indices, draws, with_raw)
    loader: DataLoader[_Item | DataError] = DataLoader(
        source,
        batch_sampler=[slots.tolist() for slots in batches],
        num_workers=_useful_workers(source, len(indices)) if workers is None else workers,
        collate_fn=_collate,
        generator=torch.Generator(),  # else the loader would draw from the global generator
    )
    for slots, fetched in zip(batches, loader, strict=True):
        if isinstance(fetched, DataError):
            raise fetched
        x, raw = fetched
        yield _transform(recipe, raw, draws, slots) if x is None else x, raw if with_raw else None


def _transform(recipe: Recipe, raw: Tensor, draws: Tensor | None, slots: Tensor) -> Tensor:
    return recipe.eval(raw) if draws is None else recipe.apply(raw, draws[slots])


@dataclass(frozen=True)
class _Single(Dataset[_Item | DataError]):
    """Single images by slot: transformed where the recipe goes image by image, raw where it does not or on request."""

    images: Images
    recipe: Recipe
    indices: Tensor
    draws: Tensor | None
    with_raw: bool

    def __getitem__(self, slot: int) -> _Item | DataError:
        try:
            return self._read(slot)
        except DataError as error:  # sent back as a value: raised in a worker it would arrive wrapped in its traceback
            return error

    def _read(self, slot: int) -> _Item:
        index = int(self.indices[slot])
        if not isinstance(self.recipe, PerImageRecipe):
            return None, self.images.raw([index], self.recipe.raw_size)[0]
        image = self.images.pil(index, _DETAIL * self.recipe.size)
        seed = None if self.draws is None else int(self.draws[slot])
        x = self.recipe.eval_image(image) if seed is None else self.recipe.train_image(image, seed)
        if not self.with_raw:
            return x, None
        in_memory = isinstance(self.images, ArrayImages)
        return x, self.images.raw([index], 0)[0] if in_memory else to_raw(image, self.recipe.raw_size)


def _useful_workers(source: _Single, count: int) -> int:
    """Processes worth starting: none for few images, for decoded ones, or where a process cannot be forked."""
    if count < _WORTH or sys.platform != "linux":
        return 0
    images, recipe = source.images, source.recipe
    if isinstance(images, FileImages) and not isinstance(recipe, PerImageRecipe):
        store, some = images.store(recipe.raw_size), source.indices[:: max(1, count // _MOST)]
        if store is not None and all(store.get(int(index)) is not None for index in some):
            return 0
    return min(cores_here(), _MOST)


def _collate(items: list[_Item | DataError]) -> _Item | DataError:
    columns: list[list[Tensor]] = [[], []]
    for item in items:
        if isinstance(item, DataError):
            return item
        for column, value in zip(columns, item, strict=True):
            if value is not None:
                column.append(value)
    x, raw = (torch.stack(column) if column else None for column in columns)
    return x, raw
