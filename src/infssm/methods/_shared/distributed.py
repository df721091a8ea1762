"""How many processes share each batch, and what they add up, for methods that measure."""

from __future__ import annotations

from infssm._processes import sum_over_processes, this_share

__all__ = ["process_rank", "sum_over_processes", "world_size"]


def world_size() -> int:
    """Number of processes that share each batch."""
    return this_share().world


def process_rank() -> int:
    """Number of this process among them."""
    return this_share().rank
