"""Shape checks shared by the operations: the error names the argument, its shape and the expected one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from infssm.errors import ConfigError


def expect_shape(name: str, tensor: Tensor | None, shape: Sequence[int]) -> None:
    """Raise unless `tensor` is None or has exactly `shape`."""
    if tensor is not None and tuple(tensor.shape) != tuple(shape):
        raise ConfigError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")


def expect_rank(name: str, tensor: Tensor, layout: str) -> None:
    """Raise unless `tensor` has as many dimensions as `layout` (such as "batch, tokens, channels") names."""
    if tensor.dim() != layout.count(",") + 1:
        raise ConfigError(f"{name} has shape {list(tensor.shape)}, expected [{layout}]")


def expect_floats(names: Iterable[str], values: Iterable[object]) -> None:
    """Raise unless every tensor among the values is of real floating-point numbers."""
    for name, value in zip(names, values, strict=False):
        if isinstance(value, Tensor) and not value.dtype.is_floating_point:
            kind = "complex" if value.is_complex() else "not of floating-point numbers"
            raise ConfigError(f"{name} is {kind} ({value.dtype}); the kernels take real floats: convert it first")


def expect_channels(name: str, tensor: Tensor) -> None:
    """Raise if the last dimension is empty: there would be nothing to take a mean over."""
    if tensor.shape[-1] == 0:
        raise ConfigError(f"{name} has shape {list(tensor.shape)}, expected at least one channel")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The widest dtype among the tensors, and never narrower than float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def split_groups(channels: int, groups: int) -> int:
    """Channels per group."""
    if groups < 1 or channels % groups:
        raise ConfigError(f"{channels} channels cannot be split into {groups} equal groups")
    return channels // groups
