"""Which pictures each batch of each rank holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from infssm.data.dataset import Indices


def train_slots(count: int, batch_size: int, *, rank: int, world: int, pairs: bool, drop_last: bool) -> list[Indices]:
    """Deal an epoch of ``count`` shuffled pictures into batches, and each batch to the ranks.

    All ranks get equally many pictures in each batch, so the last, smaller batch is cut to a multiple of ``world``.

    Args:
        count: pictures in the epoch.
        batch_size: pictures per batch and rank.
        rank: whose share to return.
        world: number of ranks.
        pairs: keep mirror images in the order of the whole batch on one rank, so that a rank mixes the pairs that a
            single process would; the last batch is then cut to a multiple of ``2 * world``.
        drop_last: leave the smaller last batch out, unless it is the only one.

    Returns:
        For each batch, int64 positions in the shuffled order.
    """
    whole = batch_size * world
    ends = list(range(whole, count + 1, whole))
    tail = count - count % (world * (2 if pairs else 1))
    if tail > (ends[-1] if ends else 0) and not (drop_last and ends):
        ends.append(tail)
    return [start + _share(end - start, rank, world) for start, end in pairwise([0, *ends])]


def eval_slots(count: int, batch_size: int, *, rank: int, world: int) -> list[Indices]:
    """Deal ``count`` pictures in order: every picture to exactly one rank, int64 positions per batch."""
    mine = np.arange(rank, count, world)
    return [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]


def _share(size: int, rank: int, world: int) -> Indices:
    """This rank's part of a batch: a stretch from the front and its mirror from the back where that divides evenly."""
    if size % (2 * world):
        return np.arange(rank * size // world, (rank + 1) * size // world)
    half = size // (2 * world)
    front = np.arange(rank * half, (rank + 1) * half)
    return np.concatenate([front, size - 1 - front[::-1]])
