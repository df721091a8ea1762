"""Shared by the operators: the division of the work into programs, and the launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Channels of a tile, one per lane of a warp, and tokens between the states that the scan keeps for its backward.
COLS, CHUNK = 32, 16
_AXES = ("batch", "step", "group")


class Cut:
    """[batch, tokens, channels] with n states, cut into tiles [states, columns], one program per batch and tile."""

    def __init__(self, batch: int, tokens: int, groups: int, channels: int, n: int) -> None:
        self.batch, self.size = batch, channels // groups
        self.sizes = {"batches": batch, "tokens": tokens, "groups": groups, "size": self.size, "n": n}
        self.states, self.columns = power_of_two(n), min(COLS, power_of_two(self.size))
        self.blocks = -(-self.size // self.columns)
        self.programs = batch * groups * self.blocks
        # At most 16 states of a channel per thread.
        warps = min(16, max(1, self.states * self.columns // 512))
        self.constants: dict[str, Any] = {"STATES": self.states, "COLS": self.columns, "warps": warps}


def power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def run(kernel: Any, programs: int, like: Tensor, *args: Any, warps: int, **constants: Any) -> None:
    """Run a kernel on the device of `like`."""
    with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]
        kernel[(programs,)](*args, **constants, num_warps=warps, enable_fp_fusion=True)


def arranged(kernel: Any, *records: Mapping[str, Any]) -> list[Any]:
    """The arguments of a kernel in its order; its parameters have the names of the records' fields."""
    named = {name: value for record in records for name, value in record.items()}
    names = [name for name in kernel.arg_names if name in named]
    assert names == kernel.arg_names[: len(names)]
    return [named[name] for name in names]


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Strides of [batch, tokens(, groups), ...] by the names of the kernels' parameters."""
    return {f"{name}_{axis}": stride for axis, stride in zip(_AXES, tensor.stride()[:-1], strict=False)}


def turned(tensor: Tensor | None) -> Tensor | None:
    """[..., channels, n] as [..., n, channels], how the kernels walk over states."""
    return None if tensor is None else tensor.mT.contiguous()
