"""Replay buffers, what processes exchange about them, and the bases that replay."""

from infssm.methods.replay.buffers import FIELDS, BalancedBuffer, Buffer, ReservoirBuffer
from infssm.methods.replay.gathering import gather_in_graph, gather_rows, process_slice

__all__ = [
    "FIELDS",
    "BalancedBuffer",
    "Buffer",
    "ReservoirBuffer",
    "gather_in_graph",
    "gather_rows",
    "process_slice",
]
