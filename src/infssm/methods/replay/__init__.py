"""Replay buffers, what processes exchange about them, and the bases that replay."""

from infssm._processes import gather_in_graph, gather_rows, process_slice
from infssm.methods.replay.buffers import FIELDS, BalancedBuffer, Buffer, ReservoirBuffer

__all__ = [
    "FIELDS",
    "BalancedBuffer",
    "Buffer",
    "ReservoirBuffer",
    "gather_in_graph",
    "gather_rows",
    "process_slice",
]
