"""Replay buffers: what they store and how they choose."""

from infssm.methods.replay.balanced import BalancedBuffer, herd, spread
from infssm.methods.replay.buffer import FIELDS, Buffer
from infssm.methods.replay.gathering import gather_in_graph, gather_rows, process_slice
from infssm.methods.replay.reservoir import ReservoirBuffer

__all__ = [
    "FIELDS",
    "BalancedBuffer",
    "Buffer",
    "ReservoirBuffer",
    "gather_in_graph",
    "gather_rows",
    "herd",
    "process_slice",
    "spread",
]
