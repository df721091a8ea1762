"""The processes of one run: which share of each batch is whose, and what they add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from infssm.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """One process's share of the work: it is number ``number`` of ``world`` processes."""

    number: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.world:
            raise ConfigError(f"there is no process {self.number} among {self.world}")


ALONE = Share()
"""All of the work: there is no other process."""


def this_share() -> Share:
    """The share of this process: all of the work where there is no other."""
    if dist.is_available() and dist.is_initialized():
        return Share(dist.get_rank(), dist.get_world_size())
    return ALONE


def sum_over_processes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The elementwise sum of each tensor over all processes, in one message; every process must call it."""
    if this_share().world == 1 or not tensors:
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    total = flat.to(message_device(flat), copy=True)
    dist.all_reduce(total)
    parts = total.to(flat.device).split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def message_device(tensor: Tensor) -> torch.device:
    """Where a tensor has to be for the processes to exchange it: NCCL sends from GPUs alone."""
    if dist.get_backend() == "nccl" and not tensor.is_cuda:
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device
