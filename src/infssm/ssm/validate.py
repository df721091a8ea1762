"""Checks of the arguments of `distance` and `principal_angles`; every error names the argument and the value."""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ssm.space import StateSpace


def check_pair(old: StateSpace, new: StateSpace, *, soft_normalize: bool = False) -> None:
    """Raise `ConfigError` unless the two systems can be compared; poles are checked after soft-normalisation."""
    for name, space in (("old", old), ("new", new)):
        _check_system(name, space, soft_normalize)
    if old.n != new.n:
        raise ConfigError(f"old.c has n = {old.n} states and new.c has n = {new.n}: both systems need the same n")
    if old.a.shape[-1] != new.a.shape[-1]:
        raise ConfigError(
            f"old.a has {old.a.shape[-1]} poles and new.a has {new.a.shape[-1]}: expand the scalar transition to n"
        )
    if old.a.is_complex() != new.a.is_complex():
        raise ConfigError(f"old.a is {old.a.dtype} and new.a is {new.a.dtype}: make both real or both complex")
    try:
        torch.broadcast_shapes(old.c.shape, new.c.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ConfigError(
            f"old.c {tuple(old.c.shape)} and new.c {tuple(new.c.shape)} do not broadcast against each other"
        ) from None


def _check_system(name: str, space: StateSpace, soft_normalize: bool) -> None:
    parts = {"a": space.a, "c": space.c} if space.b is None else {"a": space.a, "c": space.c, "b": space.b}
    for key, value in parts.items():
        if value.ndim == 0 or not (value.is_floating_point() or value.is_complex()):
            raise ConfigError(
                f"{name}.{key} must be a floating point tensor [..., n], got {value.dtype}, {value.ndim}-d"
            )
        if value.is_complex() != space.a.is_complex():
            raise ConfigError(
                f"{name}.{key} is {value.dtype} but {name}.a is {space.a.dtype}: make all real or all complex"
            )
    n = space.n
    if n == 0:
        raise ConfigError(f"{name}.c {tuple(space.c.shape)} has no states (n = 0): there is nothing to compare")
    if space.a.shape[-1] not in (1, n) or space.a.shape[:-1] != space.c.shape[:-1]:
        raise ConfigError(
            f"{name}.a {tuple(space.a.shape)} does not fit {name}.c {tuple(space.c.shape)}: need [..., n]"
        )
    if space.b is not None and space.b.shape != space.c.shape:
        raise ConfigError(
            f"{name}.b {tuple(space.b.shape)} does not fit {name}.c {tuple(space.c.shape)}: need [..., n]"
        )
    for key, value in parts.items():
        _check_all(torch.isfinite(value.detach()), value, f"{name}.{key}", "is not finite")
    poles = space.soft_normalized().a if soft_normalize else space.a
    _check_all(poles.detach().abs() < 1, poles, f"{name}.a", "lies outside the open unit disc (unstable)")


def _check_all(good: Tensor, value: Tensor, name: str, problem: str) -> None:
    if not bool(good.all()):
        index = tuple((~good).nonzero()[0].tolist())
        raise ConfigError(f"{name}{list(index)} = {value.detach()[index].item():.6g} {problem}")
