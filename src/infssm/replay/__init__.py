"""Replay buffers: what they store and how they choose."""

from infssm.replay._balanced import BalancedBuffer, herd, spread
from infssm.replay._buffer import FIELDS, Buffer
from infssm.replay._ranks import gather_in_graph, gather_rows, rank_and_world, rank_slice, sum_over_ranks
from infssm.replay._reservoir import ReservoirBuffer

__all__ = [
    "FIELDS",
    "BalancedBuffer",
    "Buffer",
    "ReservoirBuffer",
    "gather_in_graph",
    "gather_rows",
    "herd",
    "rank_and_world",
    "rank_slice",
    "spread",
    "sum_over_ranks",
]
