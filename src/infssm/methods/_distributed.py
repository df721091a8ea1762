"""Sums over the processes of a distributed run; the identity on one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes that share each batch."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    """Number of this process among them."""
    return dist.get_rank() if world_size() > 1 else 0


def sum_over_processes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The elementwise sum of each tensor over all processes, in one message; every process must call it."""
    if world_size() == 1 or not tensors:
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
