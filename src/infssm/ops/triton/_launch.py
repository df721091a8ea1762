"""Shared by the operators: the division of the work into programs, and the launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infssm.ops.library import new

if TYPE_CHECKING:
    from infssm.ops.scan import ScanInputs

# Channels of a tile, one per lane of a warp, and tokens between the states that the scan keeps for its backward.
COLS, CHUNK = 32, 16
_AXES = ("batch", "step", "group")


class Cut:
    """[batch, tokens, channels] with n states, cut into tiles [states, columns], one program per batch and tile."""

    def __init__(self, batch: int, tokens: int, groups: int, channels: int, n: int) -> None:
        self.batch, self.size = batch, channels // groups
        self.states, self.columns = power_of_two(n), min(COLS, power_of_two(self.size))
        self.blocks = -(-self.size // self.columns)
        self.programs = batch * groups * self.blocks
        # At most 16 states of a channel per thread.
        self.warps = min(16, max(1, self.states * self.columns // 512))
        self.sizes = {"batches": batch, "tokens": tokens, "groups": groups, "size": self.size, "n": n}
        self.sizes |= {"STATES": self.states, "COLS": self.columns}


def power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def run(kernel: Any, programs: int, like: Tensor, *records: Mapping[str, Any], warps: int) -> None:
    """Run a kernel on the device of `like`.

    The records hold what the kernel takes by the names of its parameters, and maybe more; of equal names the last
    counts.
    """
    named = {name: value for record in records for name, value in record.items()}
    taken = {name: named[name] for name in kernel.arg_names}
    with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]
        kernel[(programs,)](**taken, num_warps=warps, enable_fp_fusion=True)


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Strides of [batch, tokens(, groups), ...] by the names of the kernels' parameters."""
    return {f"{name}_{axis}": stride for axis, stride in zip(_AXES, tensor.stride()[:-1], strict=False)}


def scan_arguments(x: ScanInputs) -> dict[str, Any]:
    """The inputs of a scan and their strides by the names of the kernels' parameters."""
    inputs = x._asdict() | {"SOFTPLUS": x.delta_softplus, "REVERSE": x.reverse}
    for name in ("u", "delta", "z", "B", "C"):
        inputs |= strides(name, x.u if inputs[name] is None else inputs[name])
    return inputs


def turned(tensor: Tensor | None) -> Tensor | None:
    """[..., channels, n] as [..., n, channels], how the kernels walk over states."""
    return None if tensor is None else tensor.mT.contiguous()


def parts_of(total: Tensor | None, count: int) -> Tensor | None:
    """Memory for the parts of a sum, which programs write and `add_up` adds in a fixed order. None stays None."""
    return None if total is None else new(total, count, *total.shape)


def add_up(total: Tensor | None, parts: Tensor | None) -> None:
    """Fill the sum from its parts."""
    if total is not None and parts is not None:
        total.copy_(parts.sum(0))
