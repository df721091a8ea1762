"""Replay buffers: what they store and how they choose."""

from infssm.replay._balanced import BalancedBuffer, herd, spread
from infssm.replay._buffer import FIELDS, Buffer
from infssm.replay._gathering import gather_in_graph, gather_rows, process_slice
from infssm.replay._reservoir import ReservoirBuffer

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
