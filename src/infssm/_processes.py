"""The processes of one run: which share of each batch is whose, what they add up and what they exchange.

In a single process sums and exchanges are identities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

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
    """The device on which processes can exchange a tensor: NCCL only sends from GPUs."""
    if dist.get_backend() == "nccl" and not tensor.is_cuda:
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device


def gather_rows(rows: Tensor) -> Tensor:
    """Rows of all processes, ``[b_0 + b_1 + ..., ...]`` process by process; their numbers may differ."""
    world = this_share().world
    if world == 1:
        return rows
    home, device, counts = rows.device, message_device(rows), _counts(rows, world)
    padded = rows.new_zeros(max(counts), *rows.shape[1:], device=device)
    padded[: rows.shape[0]] = rows.to(device)
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).to(home)


def _counts(rows: Tensor, world: int) -> list[int]:
    """Rows of each process."""
    device = message_device(rows)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([rows.shape[0]], device=device))
    return [int(size) for size in sizes]


def largest(number: int) -> int:
    """The largest of all processes' numbers."""
    return int(gather_rows(torch.tensor([number])).max())


def gather_in_graph(rows: Tensor) -> Tensor:
    """:func:`gather_rows` with gradients to this process's own rows, for losses that compare rows with each other.

    Where every process computes such a loss of all rows and the processes then average their gradients, the result is
    the gradient of a single process.
    """
    share = this_share()
    return rows if share.world == 1 else cast(Tensor, _GatherInGraph.apply(rows, share.number, share.world))  # type: ignore[no-untyped-call]


class _GatherInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, number: int, world: int) -> Tensor:
        ctx.first = sum(_counts(rows, world)[:number])
        ctx.count, ctx.world = len(rows), world
        return gather_rows(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Each process brings the gradient of only its own rows, which the average divides by their number.
        return ctx.world * gradient[ctx.first : ctx.first + ctx.count], None, None


def process_slice(items: Tensor) -> Tensor:
    """This process's share of ``items: [m, ...]``, a contiguous piece; the shares differ by at most one item."""
    share = this_share()
    return items.tensor_split(share.world)[share.number]
