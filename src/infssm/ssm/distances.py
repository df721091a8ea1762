"""Distances between state space systems: the registry of kinds, `distance`, `principal_angles`, checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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

    The systems may have different numbers of states. Kinds of principal angles then compare the smaller subspace with
    the nearest one inside of the larger (Schubert distances): 0 where the larger contains the smaller; with
    ``count_missing=True``, `chordal` and `geodesic` count every missing dimension as a right angle. `output`,
    `simplified` and `aligned` have the same formula for any sizes. Systems with a low-rank part have `output` only, by
    ``frequencies=128`` samples of the transfer functions; the same option samples diagonal systems, too.

    Args:
        old: ``a, c, b [..., n]``.
        new: ``a, c, b [..., m]``; leading dimensions broadcast against old's.
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
    if not (old.is_diagonal and new.is_diagonal) or (kind == "output" and "frequencies" in options):
        return _sampled(old, new, kind, soft_normalize, **options)
    if kind in ops.KINDS_OF_ANGLES and (old.a.shape[-1] != new.a.shape[-1] or "count_missing" in options):
        return ops.schubert_distance(old.a, new.a, kind=kind, soft_normalize=soft_normalize, **options)
    if known is not None:
        old, new = _same_size(old, new)
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
    """The min(n, m) principal angles between the two observability subspaces, largest first.

    Small angles are computed from their sines and large ones from their cosines, so all keep their precision. A scalar
    transition ``a I`` has observability of rank 1, hence one angle.

    Args:
        old: ``a [..., n]``.
        new: ``a [..., m]``.

    Returns:
        ``[..., min(n, m)]`` in [0, pi/2].
    """
    _check_pair(old, new, soft_normalize=False)
    if not (old.is_diagonal and new.is_diagonal):
        raise ConfigError("principal_angles: a system with a low-rank part has no explicit poles; use space.to_poles()")
    old, new = _alike(old, new)
    return ops.principal_angles(old.a, new.a)


def _alike(old: StateSpace, new: StateSpace) -> tuple[StateSpace, StateSpace]:
    """Both systems in one precision of at least float32 and with equal leading dimensions."""
    dtypes = {x.dtype for space in (old, new) for x in (space.a, space.c, space.b, space.u, space.v) if x is not None}
    if dtypes != {torch.float32}:
        widest = reduce(torch.promote_types, dtypes, torch.float32)
        old, new = old.map(lambda x: x.to(widest)), new.map(lambda x: x.to(widest))
    if old.c.shape[:-1] != new.c.shape[:-1]:
        lead = torch.broadcast_shapes(old.c.shape[:-1], new.c.shape[:-1])  # type: ignore[no-untyped-call]
        old, new = (_expanded(space, lead) for space in (old, new))
    return old, new


def _expanded(space: StateSpace, lead: torch.Size) -> StateSpace:
    own = space.c.ndim - 1
    return space.map(lambda x: x.expand(*lead, *x.shape[own:]))


def _same_size(old: StateSpace, new: StateSpace) -> tuple[StateSpace, StateSpace]:
    """The smaller system with states added that have c = b = 0 and poles of the larger one: no kind that sees c
    changes by them, and the kernels and their precision near equality serve any two sizes."""
    if old.n == new.n and old.a.shape[-1] == new.a.shape[-1]:
        return old, new
    old, new = (
        space if not space.is_scalar else replace(space, a=space.a.expand(space.c.shape)) for space in (old, new)
    )
    if old.n > new.n:
        return old, _padded(new, old.a[..., new.n :])
    return _padded(old, new.a[..., old.n :]), new


def _padded(space: StateSpace, poles: Tensor) -> StateSpace:
    if not poles.shape[-1]:
        return space
    zeros = torch.zeros_like(poles)
    b = None if space.b is None else torch.cat([space.b, zeros], dim=-1)
    return replace(space, a=torch.cat([space.a, poles.detach()], -1), c=torch.cat([space.c, zeros], -1), b=b)


def _sampled(old: StateSpace, new: StateSpace, kind: str, soft_normalize: bool, **options: Any) -> Tensor:
    """`output` of two systems of any kind, by samples of their transfer functions."""
    if kind != "output":
        raise ConfigError(
            f"distance: kind {kind!r} needs poles, which a system with a low-rank part does not have; use "
            "kind='output', or compare space.to_poles(), which takes O(n^3) operations for each system"
        )
    if soft_normalize:
        if old.is_diagonal != new.is_diagonal:
            raise ConfigError(
                "distance: soft-normalisation acts on diagonal systems only, so a diagonal system and one with a "
                "low-rank part cannot be compared with it; use soft_normalize=False"
            )
        old, new = old.soft_normalized(), new.soft_normalized()
    systems = []
    for name, space in (("old", old), ("new", new)):
        if space.b is None:
            raise ConfigError(f"distance: kind 'output' needs b, and {name}.b is None; give StateSpace(a, c, b)")
        systems.append(ops.System(space.a.expand(space.c.shape), space.c, space.b, space.u, space.v))
    return ops.sampled_output(systems[0], systems[1], **options)


def _check_pair(old: StateSpace, new: StateSpace, *, soft_normalize: bool) -> None:
    """Raise `ConfigError` unless the two systems can be compared; poles are checked after soft-normalisation."""
    for name, space in (("old", old), ("new", new)):
        _check_system(name, space, soft_normalize)
    if soft_normalize and old.a.is_complex() != new.a.is_complex():
        raise ConfigError(
            f"old.a is {old.a.dtype} and new.a is {new.a.dtype}: soft-normalisation acts on real systems only; make "
            "both real or both complex, or use soft_normalize=False"
        )
    try:
        torch.broadcast_shapes(old.c.shape[:-1], new.c.shape[:-1])  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ConfigError(
            f"the leading dimensions of old.c {tuple(old.c.shape)} and new.c {tuple(new.c.shape)} do not broadcast "
            "against each other"
        ) from None


def _check_system(name: str, space: StateSpace, soft_normalize: bool) -> None:
    fields = {"a": space.a, "c": space.c, "b": space.b, "u": space.u, "v": space.v}
    tensors = {key: value for key, value in fields.items() if value is not None}
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
    if space.u is not None or space.v is not None:
        shapes = [None if x is None else tuple(x.shape) for x in (space.u, space.v)]
        if shapes[0] != shapes[1] or shapes[0] is None or (*shapes[0][:-2], shapes[0][-1]) != tuple(space.c.shape):
            raise ConfigError(
                f"{name}.u {shapes[0]} and {name}.v {shapes[1]} do not fit {name}.c {tuple(space.c.shape)}: need both, "
                "[..., rank, n]"
            )
    checks = [(torch.isfinite(value.detach()), value, key, "is not finite") for key, value in tensors.items()]
    if space.is_diagonal:
        poles = space.soft_normalized().a if soft_normalize else space.a
        checks.append((poles.detach().abs() < 1, poles, "a", "lies outside the open unit disc (unstable)"))
    for good, value, key, problem in checks:
        if not bool(good.all()):
            index = tuple((~good).nonzero()[0].tolist())
            raise ConfigError(f"{name}.{key}{list(index)} = {value.detach()[index].item():.6g} {problem}")
    if not space.is_diagonal:
        radius = torch.linalg.eigvals(space.dense().detach()).abs().amax(-1)
        if not bool((radius < 1).all()):
            raise ConfigError(
                f"{name} is unstable: the spectral radius of diag(a) + sum u v^T is {radius.max().item():.6g}; it must "
                "be below 1"
            )
