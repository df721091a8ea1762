"""Batches whose order and augmentation depend only on (seed, task, epoch, position).

Neither the number of worker processes, nor of processes that share a batch, nor where a run was interrupted changes
what a batch holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from infssm._batch import Batch
from infssm._memory import cores_here
from infssm._processes import ALONE, Share
from infssm._seeding import generator
from infssm.data._order import eval_slots, train_slots
from infssm.data.images import ArrayImages, FileImages, Images, to_raw
from infssm.data.recipes.base import PerImageRecipe, Recipe
from infssm.data.recipes.factory import make_recipe
from infssm.data.recipes.mixing import Mixing
from infssm.data.stream import Task, TaskData
from infssm.errors import ConfigError, DataError

Part = Literal["train", "val", "test"]
_DETAIL = 4
"""Pixels kept per pixel of output, a side: the smallest random crop (8 % of the area) is never enlarged."""
_WORTH = 256
"""Images for which starting processes pays."""
_MOST = 8

_Item = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class ImageLoader:
    """The batches of one epoch over one part of one task; iterating again gives the same batches.

    Made by :func:`make_loader`, which explains the options.

    Attributes:
        data: the part of the task.
        recipe: how images are transformed.
        slots: int64 positions in the epoch's order, of each batch of this process.
        skip: batches that are left out at the beginning.
        key: what the order and the augmentation depend on.
        shuffle: whether the order is shuffled.
        augment: whether the training transform is applied.
        mixing: mixing and label smoothing, if any.
        num_workers: processes that read and transform single images.
        with_raw: whether batches hold the images before augmentation too.
    """

    data: TaskData
    recipe: Recipe
    slots: list[Tensor]
    skip: int
    key: tuple[int | str, ...]
    shuffle: bool
    augment: bool
    mixing: Mixing | None
    num_workers: int | None
    with_raw: bool

    def __len__(self) -> int:
        """Batches still to come, those skipped not counted."""
        return max(0, len(self.slots) - self.skip)

    @property
    def num_samples(self) -> int:
        """Images this process gets."""
        return sum(len(slots) for slots in self.slots[self.skip :])

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.data)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=generator(*self.key, "shuffle"))
        draws = self.recipe.draw(count, generator(*self.key, "augment")) if self.augment else None
        indices = torch.from_numpy(self.data.indices)[order]
        labels = self.data.labels[order]
        slots = self.slots[self.skip :]
        stream = self._read(indices, draws, slots)
        for number, (mine, (x, raw)) in enumerate(zip(slots, stream, strict=True), start=self.skip):
            y, soft = labels[mine], None
            if self.mixing is not None:
                x, soft = self.mixing(x, y, generator(*self.key, "mix", number))
            yield Batch(x, y, soft, raw, indices[mine])

    def _read(
        self, indices: Tensor, draws: Tensor | None, batches: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Model input and, if wanted, raw images of each batch: sliced from an array, or read one by one.

        Args:
            indices: int64 [n] data set index of every slot.
            draws: [n, ...] random numbers of every slot; None for the evaluation transform.
            batches: int64 slots of each batch.
        """
        images, recipe = self.data.dataset.images, self.recipe
        if isinstance(images, ArrayImages) and not isinstance(recipe, PerImageRecipe):
            for slots in batches:
                raw = images.pixels[indices[slots]]
                yield _transform(recipe, raw, draws, slots), raw if self.with_raw else None
            return
        source = _Single(images, recipe, indices, draws, self.with_raw)
        loader: DataLoader[_Item | DataError] = DataLoader(
            source,
            batch_sampler=[slots.tolist() for slots in batches],
            num_workers=_useful_workers(source) if self.num_workers is None else self.num_workers,
            collate_fn=_collate,
            generator=torch.Generator(),  # else the loader would draw from the global generator
        )
        for slots, fetched in zip(batches, loader, strict=True):
            if isinstance(fetched, DataError):
                raise fetched
            x, read = fetched
            if x is None:
                assert read is not None
                x = _transform(recipe, read, draws, slots)
            yield x, read if self.with_raw else None


def make_loader(
    task: Task,
    split: Part = "train",
    *,
    recipe: Recipe | str,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool | None = None,
    augment: bool | None = None,
    mixing: Mixing | None = None,
    num_workers: int | None = 0,
    drop_last: bool = False,
    skip_batches: int = 0,
    share: Share = ALONE,
    with_raw: bool = False,
) -> ImageLoader:
    """Batches of one epoch over one part of a task.

    Args:
        task: the task.
        split: ``train``, ``val`` or ``test``.
        recipe: a recipe, or its name.
        batch_size: images per batch and process; w processes with b / w each see the batches of one with b.
        seed: of the run.
        epoch: which epoch; shuffling and augmentation depend on (seed, task, split, epoch) alone.
        shuffle: whether to shuffle; for ``train`` unless given. Without it every image comes exactly once, in order.
        augment: whether to apply the training transform; for ``train``, and for ``val`` where the recipe says so.
        mixing: mixing and label smoothing of shuffled training batches.
        num_workers: processes that read and transform single images; arrays with a batch recipe need none. None: as
            many as there are cores, where there is enough to do.
        drop_last: leave out a smaller last batch, unless it is the only one.
        skip_batches: start after so many batches, to go on inside an epoch.
        share: which of how many processes this is.
        with_raw: also yield the images before augmentation.
    """
    if split not in ("train", "val", "test"):
        raise ConfigError(f"unknown part {split!r}; use 'train', 'val' or 'test'")
    if batch_size < 1:
        raise ConfigError(f"cannot make batches of {batch_size}")
    shuffle = split == "train" if shuffle is None else shuffle
    if mixing is not None:
        if not shuffle:
            raise ConfigError("mixing is for shuffled training batches")
        mixing.require_even(batch_size)
    data: TaskData = getattr(task, split)
    recipe = make_recipe(recipe, data.dataset) if isinstance(recipe, str) else recipe
    if augment is None:
        augment = split == "train" or (split == "val" and recipe.augment_val)
    if shuffle:
        pairs = mixing is not None and mixing.blends
        slots = train_slots(len(data), batch_size, share, pairs=pairs, drop_last=drop_last)
    else:
        slots = eval_slots(len(data), batch_size, share)
    return ImageLoader(
        data,
        recipe,
        [torch.from_numpy(positions) for positions in slots],
        skip_batches,
        key=(seed, task.index, split, epoch),
        shuffle=shuffle,
        augment=augment,
        mixing=mixing,
        num_workers=num_workers,
        with_raw=with_raw,
    )


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


def _useful_workers(source: _Single) -> int:
    """Processes worth starting: none for few images, for decoded ones, or where a process cannot be forked."""
    count = len(source.indices)
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
