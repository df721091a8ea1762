"""Distances between state space systems: the registry of kinds, `distance`, `principal_angles`, checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from infssm import ops
from infssm._registry import Registry
from infssm.errors import ConfigError
from infssm.ops import KINDS
from infssm.ssm.space import StateSpace

DistanceFn = Callable[..., Tensor]

_REGISTERED: Registry[DistanceFn | type] = Registry("distance", "infssm.distances")
for _kind in KINDS.values():  # listed and described here; `distance` calls their operation without a detour
    _REGISTERED.register(_kind.name)(type(_kind.name, (), {"__doc__": _kind.summary}))


def register_distance(name: str) -> Callable[[DistanceFn], DistanceFn]:
    """Register ``fn(old: StateSpace, new: StateSpace, **options) -> [...]`` as a kind of `distance`.

    The systems have equal leading dimensions and one precision of at least float32, and are soft-normalised where
    that was asked for.
    """
    return _REGISTERED.register(name)


def list_distances() -> list[str]:
    """Names of every registered kind."""
    return list(_REGISTERED)


def describe_distance(name: str) -> str:
    """One line that says what a kind measures."""
    return _REGISTERED.describe(name)


def distance(
    old: StateSpace,
    new: StateSpace,
    *,
    kind: str = "simplified",
    soft_normalize: bool = False,
    validate: bool = True,
    **options: Any,
) -> Tensor:
    """Squared distance between two systems, one value per leading index.

    | kind | value | depends on |
    |---|---|---|
    | `simplified` | ``1 - tr(G3 G4) / (tr G1 tr G2)``, the paper's; in general not 0 between equal systems | a, c |
    | `aligned` | ``1 - tr(G3 G4) / (|G1|_F |G2|_F)`` | a, c |
    | `martin` | ``-log prod cos^2 theta_i`` | a |
    | `fubini-study` | ``arccos(prod cos theta_i)^2`` | a |
    | `binet-cauchy` | ``1 - prod cos^2 theta_i`` | a |
    | `chordal` | ``2 sum sin^2 theta_i`` | a |
    | `geodesic` | ``sum theta_i^2`` | a |
    | `output` | ``sum_t |c a^t b - c' a'^t b'|^2`` | a, c, b |

    Differentiable in every tensor; all kinds but `simplified` have value 0 and gradient 0 at equality. The kinds that
    depend on a alone compare subspaces: order, scale and coordinates of the states do not matter. `simplified` and
    `aligned` do not depend on the scale of c, however large or small; where c is all zero on one side they are 0. A
    scalar transition (``a [..., 1]``) has observability of rank 1, so the kinds that depend on a alone use n = 1, and
    the others sum ``|c|^2`` or ``c b``. All tensors are converted to the widest of their types, at least float32.

    Args:
        old: ``a, c, b [..., n]``.
        new: ``a, c, b [..., n]``; leading dimensions broadcast against old's.
        kind: one of `list_distances`.
        soft_normalize: apply soft-normalisation to raw real states first. Poles are compared as they were given, so
            raw ones up to 80 keep their precision, although tanh(x / 2) rounds to 1 beyond 17 in float32.
        validate: check shapes, types, NaN and poles, with errors that name the argument. This reads values and so
            synchronises with the device; training passes False, and a pole outside the unit disc gives NaN.
        options: options of the kind, such as ``equality="token" | "tensor" | "off"`` of `simplified`.

    Returns:
        ``[...]``.
    """
    known = KINDS.get(kind)
    fn = None if known is not None else _REGISTERED[kind]
    if validate:
        _check_pair(old, new, soft_normalize=soft_normalize)
    old, new = _alike(old, new)
    if known is not None:
        if "b" in known.sees and (old.b is None or new.b is None):
            raise ConfigError(
                f"distance: kind {kind!r} needs b, and {'old' if old.b is None else 'new'}.b is None; give "
                "StateSpace(a, c, b), or use kind 'aligned'"
            )
        return ops.fused_distance(
            old.a, old.c, new.a, new.c, kind=kind, old_b=old.b, new_b=new.b, soft_normalize=soft_normalize, **options
        )
    assert fn is not None
    if soft_normalize:
        old, new = old.soft_normalized(), new.soft_normalized()
    found: Tensor = fn(old, new, **options)
    return found


def principal_angles(old: StateSpace, new: StateSpace) -> Tensor:
    """Principal angles between the two observability subspaces, largest first.

    Small angles are computed from their sines and large ones from their cosines, so all keep their precision. A scalar
    transition ``a I`` has observability of rank 1, hence one angle.

    Args:
        old: ``a [..., n]``.
        new: ``a [..., n]``.

    Returns:
        ``[..., n]`` in [0, pi/2].
    """
    _check_pair(old, new, soft_normalize=False)
    old, new = _alike(old, new)
    return ops.principal_angles(old.a, new.a)


def _alike(old: StateSpace, new: StateSpace) -> tuple[StateSpace, StateSpace]:
    """Both systems in one precision of at least float32 and with equal leading dimensions."""
    dtypes = {old.a.dtype, old.c.dtype, new.a.dtype, new.c.dtype}
    for b in (old.b, new.b):
        if b is not None:
            dtypes.add(b.dtype)
    if dtypes != {torch.float32}:
        widest = reduce(torch.promote_types, dtypes, torch.float32)
        old, new = old.map(lambda x: x.to(widest)), new.map(lambda x: x.to(widest))
    if old.c.shape != new.c.shape:
        lead = torch.broadcast_shapes(old.c.shape[:-1], new.c.shape[:-1])  # type: ignore[no-untyped-call]
        old, new = (space.map(lambda x: x.expand(*lead, x.shape[-1])) for space in (old, new))
    return old, new


def _check_pair(old: StateSpace, new: StateSpace, *, soft_normalize: bool) -> None:
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
    tensors = {"a": space.a, "c": space.c} if space.b is None else {"a": space.a, "c": space.c, "b": space.b}
    for key, value in tensors.items():
        if value.ndim == 0 or not (value.is_floating_point() or value.is_complex()):
            raise ConfigError(
                f"{name}.{key} must be a floating point tensor [..., n], got {value.dtype}, {value.ndim}-d"
            )
        if value.is_complex() != space.a.is_complex():
            raise ConfigError(
                f"{name}.{key} is {value.dtype} but {name}.a is {space.a.dtype}: make all real or all complex"
            )
    if space.n == 0:
        raise ConfigError(f"{name}.c {tuple(space.c.shape)} has no states (n = 0): there is nothing to compare")
    fits = {"a": space.a.shape[-1] in (1, space.n) and space.a.shape[:-1] == space.c.shape[:-1]}
    fits["b"] = space.b is None or space.b.shape == space.c.shape
    for key, fit in fits.items():
        if not fit:
            raise ConfigError(
                f"{name}.{key} {tuple(tensors[key].shape)} does not fit {name}.c {tuple(space.c.shape)}: need [..., n]"
            )
    poles = space.soft_normalized().a if soft_normalize else space.a
    checks = [(torch.isfinite(value.detach()), value, key, "is not finite") for key, value in tensors.items()]
    checks.append((poles.detach().abs() < 1, poles, "a", "lies outside the open unit disc (unstable)"))
    for good, value, key, problem in checks:
        if not bool(good.all()):
            index = tuple((~good).nonzero()[0].tolist())
            raise ConfigError(f"{name}.{key}{list(index)} = {value.detach()[index].item():.6g} {problem}")
