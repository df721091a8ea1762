"""Which images each batch of each process holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from infssm._processes import Share
from infssm.data.dataset import Indices


def train_slots(count: int, batch_size: int, share: Share, *, pairs: bool, drop_last: bool) -> list[Indices]:
    """Deal an epoch of ``count`` shuffled images into batches, and each batch to the processes.

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
    whole = batch_size * share.world
    ends = list(range(whole, count + 1, whole))
    tail = count - count % (share.world * (2 if pairs else 1))
    if tail > (ends[-1] if ends else 0) and not (drop_last and ends):
        ends.append(tail)
    return [start + _part(end - start, share) for start, end in pairwise([0, *ends])]


def eval_slots(count: int, batch_size: int, share: Share) -> list[Indices]:
    """Deal ``count`` images in order: every image to exactly one process, int64 positions per batch."""
    mine = np.arange(share.number, count, share.world)
    return [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]


def _part(size: int, share: Share) -> Indices:
    """A process's part of a batch: a stretch from the front and its mirror from the back where that divides evenly."""
    number, world = share.number, share.world
    if size % (2 * world):
        return np.arange(number * size // world, (number + 1) * size // world)
    half = size // (2 * world)
    front = np.arange(number * half, (number + 1) * half)
    return np.concatenate([front, size - 1 - front[::-1]])
