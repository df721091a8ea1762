"""Batches whose order and augmentation depend only on (seed, task, epoch, position).

Neither the number of worker processes, nor of processes that share a batch, nor where a run was interrupted changes
what a batch holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from infssm._batch import Batch
from infssm._machine import cores_here
from infssm._processes import ALONE, Share
from infssm._seeding import generator
from infssm.data.augmentation import Mixing
from infssm.data.dataset import Indices
from infssm.data.images import ArrayImages, FileImages, Images, to_raw
from infssm.data.recipes import PerImageRecipe, Recipe, make_recipe
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

_Item = dict[str, Tensor]
"""``x``, ``raw`` or both."""


@dataclass(eq=False)
class _Loader:
    """Base of the loaders of images and of sequences; see :class:`ImageLoader` for the options."""

    task: Task
    split: Part = "train"
    _: KW_ONLY
    batch_size: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool | None = None
    drop_last: bool = False
    skip_batches: int = 0
    in_order: bool = False
    share: Share = ALONE

    def __post_init__(self) -> None:
        if self.split not in ("train", "val", "test"):
            raise ConfigError(f"unknown part {self.split!r}; use 'train', 'val' or 'test'")
        if self.batch_size < 1:
            raise ConfigError(f"cannot make batches of {self.batch_size}")
        self.data: TaskData = getattr(self.task, self.split)
        self.shuffle = not self.in_order and (self.split == "train" if self.shuffle is None else self.shuffle)
        self._key = (self.seed, self.task.index, self.split, self.epoch)
        self._slots = self._divide()

    def _divide(self, *, pairs: bool = False) -> list[Indices]:
        """Positions in the epoch's order of each batch of this process."""
        if not self.shuffle:
            return eval_slots(len(self.data), self.batch_size, self.share)
        return train_slots(len(self.data), self.batch_size, self.share, pairs=pairs, drop_last=self.drop_last)

    def __len__(self) -> int:
        """Batches still to come, those skipped not counted."""
        return max(0, len(self._slots) - self.skip_batches)


@dataclass(eq=False)
class ImageLoader(_Loader):
    """Batches of images of one epoch over one part of a task; iterating again gives the same batches.

    Args:
        task: the task.
        split: ``train``, ``val`` or ``test``.
        recipe: a recipe, or its name.
        batch_size: images per batch and process; w processes with b / w each see the batches of one with b.
        seed: seed of the run.
        epoch: which epoch; shuffling and augmentation depend only on (seed, task, split, epoch).
        shuffle: whether to shuffle; for ``train`` unless given. Without it every image comes exactly once, in order.
        augment: whether to apply the training transform; for ``train``, and for ``val`` if ``recipe.augment_val``.
        mixing: mixing and label smoothing of shuffled training batches.
        num_workers: processes that read and transform single images; arrays with a batch recipe need none. None: as
            many as there are cores, if there is enough to do.
        drop_last: leave out a smaller last batch, unless it is the only one.
        skip_batches: start after so many batches, to continue within an epoch.
        in_order: every sample once, in the order of the task's indices, as a stream brings them.
        share: which of how many processes this is.
        with_raw: also yield the images before augmentation.
    """

    _: KW_ONLY
    recipe: Recipe | str
    augment: bool | None = None
    mixing: Mixing | None = None
    num_workers: int | None = 0
    with_raw: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        recipe = self.recipe
        self._recipe = make_recipe(recipe, self.data.dataset) if isinstance(recipe, str) else recipe
        if self.augment is None:
            self.augment = self.split == "train" or (self.split == "val" and self._recipe.augment_val)
        if self.mixing is not None:
            if not self.shuffle:
                raise ConfigError("mixing is for shuffled training batches")
            self.mixing.require_even(self.batch_size)
            self._slots = self._divide(pairs=self.mixing.blends)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.data)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=generator(*self._key, "shuffle"))
        draws = self._recipe.draw(count, generator(*self._key, "augment")) if self.augment else None
        indices = torch.from_numpy(self.data.indices)[order]
        labels = self.data.labels[order]
        slots = [torch.from_numpy(positions) for positions in self._slots[self.skip_batches :]]
        stream = self._read(indices, draws, slots)
        for number, (mine, (x, raw)) in enumerate(zip(slots, stream, strict=True), start=self.skip_batches):
            y, soft = labels[mine], None
            if self.mixing is not None:
                x, soft = self.mixing(x, y, generator(*self._key, "mix", number))
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
        images, recipe = self.data.dataset.images, self._recipe
        loaded: Iterator[_Item | DataError]
        if isinstance(images, ArrayImages) and not isinstance(recipe, PerImageRecipe):
            loaded = ({"raw": images.pixels[indices[slots]]} for slots in batches)
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
            raw = fetched.get("raw")
            if "x" not in fetched:
                assert raw is not None
                fetched["x"] = recipe.eval(raw) if draws is None else recipe.apply(raw, draws[slots])
            yield fetched["x"], raw


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
                return {"raw": self.images.raw([index], self.recipe.raw_size)[0]}
            image = self.images.pil(index, _DETAIL * self.recipe.size)
        except DataError as error:  # returned as a value: raised in a worker it would arrive wrapped in its traceback
            return error
        if self.draws is None:
            x = self.recipe.eval_image(image)
        else:
            x = self.recipe.train_image(image, int(self.draws[slot]))
        if not self.with_raw:
            return {"x": x}
        in_memory = isinstance(self.images, ArrayImages)
        return {"x": x, "raw": self.images.raw([index], 0)[0] if in_memory else to_raw(image, self.recipe.raw_size)}

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
    error = next((item for item in items if isinstance(item, DataError)), None)
    found: _Item | DataError = error or default_collate(items)
    return found


@dataclass(eq=False)
class SequenceLoader(_Loader):
    """Batches of sequences, padded, with a mask; the options are those of :class:`ImageLoader`.

    Shuffled batches hold sequences of similar lengths; without shuffling every sample comes exactly once, shortest
    first.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = self.data.dataset.sequences.lengths[self.data.indices]
        if self.shuffle:
            order = bucketed_order(lengths, self.batch_size * self.share.world, generator(*self._key, "shuffle"))
        else:
            order = np.arange(len(lengths)) if self.in_order else np.argsort(lengths, kind="stable")
        self._order = order

    def __iter__(self) -> Iterator[Batch]:
        sequences, modality = self.data.dataset.sequences, self.data.dataset.modality
        for slots in self._slots[self.skip_batches :]:
            rows = self._order[slots]
            indices = self.data.indices[rows]
            samples = [sequences.sequence(int(index)) for index in indices]
            batch = modality.collate(samples, self.data.labels[torch.from_numpy(rows)])
            yield replace(batch, index=torch.from_numpy(indices))


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
