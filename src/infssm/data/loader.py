"""Batches whose order and augmentation depend only on (seed, task, epoch, position).

Neither the number of worker processes, nor of processes that share a batch, nor where a run was interrupted changes
what a batch holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from infssm._batch import Batch
from infssm._memory import cores_here
from infssm._processes import ALONE, Share
from infssm._seeding import generator
from infssm.data.dataset import Indices
from infssm.data.images import ArrayImages, FileImages, Images, to_raw
from infssm.data.recipes.factory import make_recipe
from infssm.data.recipes.mixing import Mixing
from infssm.data.recipes.recipe import PerImageRecipe, Recipe
from infssm.data.stream import Task, TaskData
from infssm.errors import ConfigError, DataError

Part = Literal["train", "val", "test"]
_DETAIL = 4
"""Pixels kept per pixel of output, a side: the smallest random crop (8 % of the area) is never enlarged."""
_MIN_FOR_WORKERS = 256
"""Images for which starting processes pays."""
_MAX_WORKERS = 8
_POOL = 50
"""Batches whose samples are sorted by length together: enough to save padding, few enough to mix lengths."""

_Item = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _Loader:
    """The batches of one epoch over one part of one task; iterating again gives the same batches.

    Attributes:
        data: the part of the task.
        slots: int64 positions in the epoch's order, of each batch of this process.
        skip: batches that are left out at the beginning.
    """

    data: TaskData
    slots: list[Indices]
    skip: int

    def __len__(self) -> int:
        """Batches still to come, those skipped not counted."""
        return max(0, len(self.slots) - self.skip)


@dataclass(frozen=True)
class ImageLoader(_Loader):
    """Batches of images. Made by :func:`make_loader`, which explains the options.

    Attributes:
        recipe: how images are transformed.
        key: what the order and the augmentation depend on.
        shuffle: whether the order is shuffled.
        augment: whether the training transform is applied.
        mixing: mixing and label smoothing, if any.
        num_workers: processes that read and transform single images.
        with_raw: whether batches hold the images before augmentation too.
    """

    recipe: Recipe
    key: tuple[int | str, ...]
    shuffle: bool
    augment: bool
    mixing: Mixing | None
    num_workers: int | None
    with_raw: bool

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.data)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=generator(*self.key, "shuffle"))
        draws = self.recipe.draw(count, generator(*self.key, "augment")) if self.augment else None
        indices = torch.from_numpy(self.data.indices)[order]
        labels = self.data.labels[order]
        slots = [torch.from_numpy(positions) for positions in self.slots[self.skip :]]
        stream = self._read(indices, draws, slots)
        for number, (mine, (x, raw)) in enumerate(zip(slots, stream, strict=True), start=self.skip):
            y, soft = labels[mine], None
            if self.mixing is not None:
                x, soft = self.mixing(x, y, generator(*self.key, "mix", number))
            yield Batch(x, y, soft, raw if self.with_raw else None, indices[mine])

    def _read(
        self, indices: Tensor, draws: Tensor | None, batches: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Model input and raw images of each batch: sliced from an array, or read one by one.

        Args:
            indices: int64 [n] data set index of every slot.
            draws: [n, ...] random numbers of every slot; None for the evaluation transform.
            batches: int64 slots of each batch.
        """
        images, recipe = self.data.dataset.images, self.recipe
        loaded: Iterator[_Item | DataError]
        if isinstance(images, ArrayImages) and not isinstance(recipe, PerImageRecipe):
            loaded = ((None, images.pixels[indices[slots]]) for slots in batches)
        else:
            source = _Single(images, recipe, indices, draws, self.with_raw)
            loaded = iter(
                DataLoader(
                    source,
                    batch_sampler=[slots.tolist() for slots in batches],
                    num_workers=source.useful_workers() if self.num_workers is None else self.num_workers,
                    collate_fn=_collate,
                    generator=torch.Generator(),  # else the loader would draw from the global generator
                )
            )
        for slots, fetched in zip(batches, loaded, strict=True):
            if isinstance(fetched, DataError):
                raise fetched
            x, raw = fetched
            if x is None:
                assert raw is not None
                x = recipe.eval(raw) if draws is None else recipe.apply(raw, draws[slots])
            yield x, raw


@dataclass(frozen=True)
class _Single(Dataset[_Item | DataError]):
    """Single images by slot: transformed where the recipe goes image by image, raw where it does not or on request."""

    images: Images
    recipe: Recipe
    indices: Tensor
    draws: Tensor | None
    with_raw: bool

    def __getitem__(self, slot: int) -> _Item | DataError:
        index = int(self.indices[slot])
        try:
            if not isinstance(self.recipe, PerImageRecipe):
                return None, self.images.raw([index], self.recipe.raw_size)[0]
            image = self.images.pil(index, _DETAIL * self.recipe.size)
        except DataError as error:  # returned as a value: raised in a worker it would arrive wrapped in its traceback
            return error
        if self.draws is None:
            x = self.recipe.eval_image(image)
        else:
            x = self.recipe.train_image(image, int(self.draws[slot]))
        if not self.with_raw:
            return x, None
        in_memory = isinstance(self.images, ArrayImages)
        return x, self.images.raw([index], 0)[0] if in_memory else to_raw(image, self.recipe.raw_size)

    def useful_workers(self) -> int:
        """Processes worth starting: none for few images, for decoded ones, or where a process cannot be forked."""
        count = len(self.indices)
        if count < _MIN_FOR_WORKERS or sys.platform != "linux":
            return 0
        if isinstance(self.images, FileImages) and not isinstance(self.recipe, PerImageRecipe):
            store, some = self.images.store(self.recipe.raw_size), self.indices[:: max(1, count // _MAX_WORKERS)]
            if store is not None and all(store.get(int(index)) is not None for index in some):
                return 0
        return min(cores_here(), _MAX_WORKERS)


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
    in_order: bool = False,
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
        augment: whether to apply the training transform; for ``train``, and for ``val`` if ``recipe.augment_val``.
        mixing: mixing and label smoothing of shuffled training batches.
        num_workers: processes that read and transform single images; arrays with a batch recipe need none. None: as
            many as there are cores, where there is enough to do.
        drop_last: leave out a smaller last batch, unless it is the only one.
        skip_batches: start after so many batches, to go on inside an epoch.
        in_order: every sample once, in the order of the task's indices, as a stream brings them.
        share: which of how many processes this is.
        with_raw: also yield the images before augmentation.
    """
    data, shuffle = _part(task, split, batch_size, False if in_order else shuffle)
    if mixing is not None:
        if not shuffle:
            raise ConfigError("mixing is for shuffled training batches")
        mixing.require_even(batch_size)
    recipe = make_recipe(recipe, data.dataset) if isinstance(recipe, str) else recipe
    if shuffle:
        pairs = mixing is not None and mixing.blends
        slots = train_slots(len(data), batch_size, share, pairs=pairs, drop_last=drop_last)
    else:
        slots = eval_slots(len(data), batch_size, share)
    return ImageLoader(
        data,
        slots,
        skip_batches,
        recipe,
        key=(seed, task.index, split, epoch),
        shuffle=shuffle,
        augment=split == "train" or (split == "val" and recipe.augment_val) if augment is None else augment,
        mixing=mixing,
        num_workers=num_workers,
        with_raw=with_raw,
    )


@dataclass(frozen=True)
class SequenceLoader(_Loader):
    """Batches of sequences, padded, with a mask. Made by :func:`make_sequence_loader`, which explains the options.

    Attributes:
        order: int64 [n] order of the samples, those of similar lengths beside each other.
    """

    order: Indices

    def __iter__(self) -> Iterator[Batch]:
        sequences, modality = self.data.dataset.sequences, self.data.dataset.modality
        for slots in self.slots[self.skip :]:
            rows = self.order[slots]
            indices = self.data.indices[rows]
            samples = [sequences.sequence(int(index)) for index in indices]
            batch = modality.collate(samples, self.data.labels[torch.from_numpy(rows)])
            yield replace(batch, index=torch.from_numpy(indices))


def make_sequence_loader(
    task: Task,
    split: Part = "train",
    *,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool | None = None,
    drop_last: bool = False,
    skip_batches: int = 0,
    in_order: bool = False,
    share: Share = ALONE,
) -> SequenceLoader:
    """Batches of one epoch over one part of a task whose samples are sequences.

    Arguments are those of :func:`make_loader`. Shuffled batches hold sequences of similar lengths; without shuffling
    every sample comes exactly once, shortest first.
    """
    data, shuffle = _part(task, split, batch_size, False if in_order else shuffle)
    lengths = data.dataset.sequences.lengths[data.indices]
    if shuffle:
        order = bucketed_order(lengths, batch_size * share.world, generator(seed, task.index, split, epoch, "shuffle"))
        slots = train_slots(len(data), batch_size, share, pairs=False, drop_last=drop_last)
    else:
        order = np.arange(len(data)) if in_order else np.argsort(lengths, kind="stable")
        slots = eval_slots(len(data), batch_size, share)
    return SequenceLoader(data, slots, skip_batches, order)


def _part(task: Task, split: Part, batch_size: int, shuffle: bool | None) -> tuple[TaskData, bool]:
    """The part of a task, and whether to shuffle it; ConfigError for options that no loader can have."""
    if split not in ("train", "val", "test"):
        raise ConfigError(f"unknown part {split!r}; use 'train', 'val' or 'test'")
    if batch_size < 1:
        raise ConfigError(f"cannot make batches of {batch_size}")
    return getattr(task, split), split == "train" if shuffle is None else shuffle


def bucketed_order(lengths: Indices, batch: int, rng: torch.Generator) -> Indices:
    """A shuffled order in which every ``batch`` neighbours have similar lengths: int64 [n].

    Samples are shuffled, sorted by length in pools of some batches, and the whole batches shuffled again; the smaller
    last batch stays last.
    """
    shuffled = torch.randperm(len(lengths), generator=rng).numpy()
    pool = _POOL * batch
    pools = [shuffled[start : start + pool] for start in range(0, len(shuffled), pool)]
    order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in pools] or [shuffled])
    whole = len(order) // batch * batch
    batches = order[:whole].reshape(-1, batch)[torch.randperm(whole // batch, generator=rng).numpy()]
    return np.concatenate([batches.reshape(-1), order[whole:]])


def train_slots(count: int, batch_size: int, share: Share, *, pairs: bool, drop_last: bool) -> list[Indices]:
    """Divide an epoch of ``count`` shuffled images into batches, and each batch among the processes.

    All get equally many images in each batch, so the last, smaller batch is cut to a multiple of their number.

    Args:
        count: images in the epoch.
        batch_size: images per batch and process.
        share: whose images to return.
        pairs: keep mirror images in the order of the whole batch on one process, so that each mixes the pairs that a
            single process would; the last batch is then cut to a multiple of ``2 * share.world``.
        drop_last: leave the smaller last batch out, unless it is the only one.

    Returns:
        For each batch, int64 positions in the shuffled order.
    """
    number, world = share.number, share.world
    ends = list(range(batch_size * world, count + 1, batch_size * world))
    tail = count - count % (world * (2 if pairs else 1))
    if tail > (ends[-1] if ends else 0) and not (drop_last and ends):
        ends.append(tail)
    slots = []
    for start, end in pairwise([0, *ends]):
        size = end - start
        if size % (2 * world):
            part = np.arange(number * size // world, (number + 1) * size // world)
        else:  # a stretch from the front and its mirror from the back
            half = size // (2 * world)
            front = np.arange(number * half, (number + 1) * half)
            part = np.concatenate([front, size - 1 - front[::-1]])
        slots.append(start + part)
    return slots


def eval_slots(count: int, batch_size: int, share: Share) -> list[Indices]:
    """Divide ``count`` images in order: every image to exactly one process, int64 positions per batch."""
    mine = np.arange(share.number, count, share.world)
    return [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]
