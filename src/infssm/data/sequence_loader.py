"""Batches of sequences: padded, with a mask, of similar lengths; order depends only on (seed, task, epoch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from infssm._batch import Batch
from infssm._processes import ALONE, Share
from infssm._seeding import generator
from infssm.data._order import eval_slots, train_slots
from infssm.data.dataset import Indices
from infssm.data.loader import Part
from infssm.data.stream import Task, TaskData
from infssm.errors import ConfigError

_POOL = 50
"""Batches whose samples are sorted by length together: enough to save padding, few enough to mix lengths."""


class SequenceLoader:
    """The batches of one epoch over one part of one task; iterating again gives the same batches.

    Made by :func:`make_sequence_loader`, which explains the options.
    """

    def __init__(self, data: TaskData, order: Indices, slots: list[Indices]) -> None:
        self.data = data
        self._order = order
        self._slots = slots

    def __len__(self) -> int:
        """Batches still to come."""
        return len(self._slots)

    @property
    def num_samples(self) -> int:
        """Samples this process gets."""
        return sum(len(slots) for slots in self._slots)

    def __iter__(self) -> Iterator[Batch]:
        sequences, modality = self.data.dataset.sequences, self.data.dataset.modality
        for slots in self._slots:
            rows = self._order[slots]
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
    share: Share = ALONE,
) -> SequenceLoader:
    """Batches of one epoch over one part of a task whose samples are sequences.

    Args:
        task: the task.
        split: ``train``, ``val`` or ``test``.
        batch_size: samples per batch and process.
        seed: of the run.
        epoch: which epoch; the order depends on (seed, task, split, epoch) alone.
        shuffle: whether to shuffle, in batches of similar lengths; for ``train`` unless given. Without it every sample
            comes exactly once, shortest first.
        drop_last: leave out a smaller last batch, unless it is the only one.
        skip_batches: start after so many batches, to go on inside an epoch.
        share: which of how many processes this is.
    """
    if split not in ("train", "val", "test"):
        raise ConfigError(f"unknown part {split!r}; use 'train', 'val' or 'test'")
    if batch_size < 1:
        raise ConfigError(f"cannot make batches of {batch_size}")
    data: TaskData = getattr(task, split)
    lengths = data.dataset.sequences.lengths[data.indices]
    if shuffle if shuffle is not None else split == "train":
        order = bucketed_order(lengths, batch_size * share.world, generator(seed, task.index, split, epoch, "shuffle"))
        slots = train_slots(len(data), batch_size, share, pairs=False, drop_last=drop_last)
    else:
        order = np.argsort(lengths, kind="stable")
        slots = eval_slots(len(data), batch_size, share)
    return SequenceLoader(data, order, slots[skip_batches:])


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
