"""Distances between old and new states (mean transition, C, B) in one pass, soft-normalisation inside."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.kernels import _ops, _reference
from infssm.kernels._checks import expect_shape
from infssm.kernels._operators import operators
from infssm.kernels.backend import single

Kind = Literal["simplified", "aligned", "martin", "fubini-study", "binet-cauchy", "chordal", "geodesic", "output"]
KINDS: tuple[str, ...] = get_args(Kind)
CPU_ONLY = ("chordal", "geodesic")
"""Kinds without a Triton kernel."""


def fused_distance(
    old_a: Tensor,
    old_c: Tensor,
    new_a: Tensor,
    new_c: Tensor,
    *,
    kind: Kind,
    old_b: Tensor | None = None,
    new_b: Tensor | None = None,
    soft_normalize: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Squared distance per token, `[...]`, of the soft-normalised states.

    soft_normalize: the states are raw; False takes them as they are, poles inside the unit interval.

    old_a, new_a: [..., n] or [..., 1] (scalar transition); old_c, new_c: [..., n]; old_b, new_b: [..., n], which
    `output` needs and the others ignore. Differentiable in all of them.
    simplified: the paper's 1 - tr(G3 G4) / (tr G1 tr G2), 0 with zero gradient where old and new agree to
    allclose's tolerance; aligned: Frobenius norms in place of the traces; output:
    energy of the difference of the impulse responses. From a alone, with the principal angles theta: martin:
    -log prod cos^2; fubini-study: arccos^2(prod cos); binet-cauchy: 1 - prod cos^2; chordal: 2 sum sin^2;
    geodesic: sum theta^2.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} has no fused kernel, expected one of {', '.join(KINDS)}")
    n = old_c.shape[-1]
    expect_shape("old_a", old_a, (*old_c.shape[:-1], 1 if old_a.shape[-1] == 1 else n))
    expect_shape("new_a", new_a, old_a.shape)
    expect_shape("new_c", new_c, old_c.shape)
    if kind == "output":
        return _output(old_a, old_c, old_b, new_a, new_c, new_b, soft_normalize, backend)
    ops = operators(backend, old_a, old_c, new_a, new_c)
    if kind in CPU_ONLY and ops is _ops:
        poles = single(old_a), single(new_a)
        angles: Tensor = getattr(ops, kind)(*poles, soft_normalize, *(_needs_grad(side) for side in poles))[0]
        return angles
    if kind not in CPU_ONLY and ops is not None:
        states = [single(tensor) for tensor in (old_a, old_c, new_a, new_c)]
        to_old, to_new = _needs_grad(*states[:2]), _needs_grad(*states[2:])
        value: Tensor = ops.distance(*states, _ops.KINDS[kind], soft_normalize, to_old, to_new)[0]
        return value
    return _reference.fused_distance(old_a, old_c, new_a, new_c, kind, soft_normalize)


def _output(
    old_a: Tensor,
    old_c: Tensor,
    old_b: Tensor | None,
    new_a: Tensor,
    new_c: Tensor,
    new_b: Tensor | None,
    soft_normalize: bool,
    backend: str | None,
) -> Tensor:
    if old_b is None or new_b is None:
        raise ConfigError("kind='output' needs old_b and new_b")
    expect_shape("old_b", old_b, old_c.shape)
    expect_shape("new_b", new_b, old_c.shape)
    old, new = (old_a, old_c, old_b), (new_a, new_c, new_b)
    ops = operators(backend, *old, *new)
    # The kernels have no derivatives for the old side and no scalar transition: rare, and served by PyTorch.
    if ops is not None and old_a.shape == old_c.shape and not _needs_grad(*old):
        states = [single(tensor) for tensor in (*old, *new)]
        value: Tensor = ops.output_distance(*states, soft_normalize, _needs_grad(*states[3:]))[0]
        return value
    return _reference.output_distance(*old, *new, soft_normalize)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
