"""Batches whose order and augmentation depend only on (seed, task, epoch, position).

Neither the number of worker processes, nor of processes that share a batch, nor where a run was interrupted changes
what a batch holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from infssm._batch import Batch
from infssm._processes import ALONE, Share
from infssm._seeding import generator
from infssm.data._order import eval_slots, train_slots
from infssm.data._reading import read_images
from infssm.data.recipes.base import Recipe
from infssm.data.recipes.factory import make_recipe
from infssm.data.recipes.mixing import Mixing
from infssm.data.stream import Task, TaskData
from infssm.errors import ConfigError

Part = Literal["train", "val", "test"]


class ImageLoader:
    """The batches of one epoch over one part of one task; iterating again gives the same batches.

    Made by :func:`make_loader`, which explains the options.
    """

    def __init__(
        self,
        data: TaskData,
        recipe: Recipe,
        *,
        key: tuple[int | str, ...],
        batch_size: int,
        shuffle: bool,
        augment: bool,
        mixing: Mixing | None,
        num_workers: int | None,
        drop_last: bool,
        skip_batches: int,
        share: Share,
        with_raw: bool,
    ) -> None:
        self.data = data
        self.recipe = recipe
        self.mixing = mixing
        self.num_workers = num_workers
        self.with_raw = with_raw
        self._key = key
        self._shuffle = shuffle
        self._augment = augment
        self._skip = skip_batches
        if shuffle:
            pairs = mixing is not None and mixing.blends
            self._slots = train_slots(len(data), batch_size, share, pairs=pairs, drop_last=drop_last)
        else:
            self._slots = eval_slots(len(data), batch_size, share)

    def __len__(self) -> int:
        """Batches still to come, those skipped not counted."""
        return max(0, len(self._slots) - self._skip)

    @property
    def num_samples(self) -> int:
        """Images this process gets."""
        return sum(len(slots) for slots in self._slots[self._skip :])

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.data)
        order = torch.arange(count)
        if self._shuffle:
            order = torch.randperm(count, generator=generator(*self._key, "shuffle"))
        draws = self.recipe.draw(count, generator(*self._key, "augment")) if self._augment else None
        indices = torch.from_numpy(self.data.indices)[order]
        labels = self.data.labels[order]
        slots = [torch.from_numpy(s) for s in self._slots[self._skip :]]
        stream = read_images(
            self.data.dataset.images,
            self.recipe,
            indices,
            draws,
            slots,
            with_raw=self.with_raw,
            workers=self.num_workers,
        )
        for number, (mine, (x, raw)) in enumerate(zip(slots, stream, strict=True), start=self._skip):
            y, soft = labels[mine], None
            if self.mixing is not None:
                x, soft = self.mixing(x, y, generator(*self._key, "mix", number))
            yield Batch(x, y, soft, raw, indices[mine])


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
    return ImageLoader(
        data,
        recipe,
        key=(seed, task.index, split, epoch),
        batch_size=batch_size,
        shuffle=shuffle,
        augment=augment,
        mixing=mixing,
        num_workers=num_workers,
        drop_last=drop_last,
        skip_batches=skip_batches,
        share=share,
        with_raw=with_raw,
    )
