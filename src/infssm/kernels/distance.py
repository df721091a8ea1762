"""Distances between old and new states straight from raw (mean transition, C), soft-normalisation inside."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.kernels import _ops, _reference
from infssm.kernels._backend import single, use_native
from infssm.kernels._checks import expect_shape

KINDS = ("simplified", "aligned", "martin")


def fused_distance(
    old_a: Tensor,
    old_c: Tensor,
    new_a: Tensor,
    new_c: Tensor,
    *,
    kind: Literal["simplified", "aligned", "martin"],
    backend: str | None = None,
) -> Tensor:
    """Squared distance per token, `[...]`, of the soft-normalised states.

    old_a, new_a: [..., n] or [..., 1] (scalar transition); old_c, new_c: [..., n]. Differentiable in all four.
    simplified: the paper's 1 - tr(G3 G4) / (tr G1 tr G2), 0 with zero gradient where old and new agree to
    allclose's tolerance; aligned: Frobenius norms in place of the traces; martin: -log prod cos^2, from a alone.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} has no fused kernel, expected one of {', '.join(KINDS)}")
    n = old_c.shape[-1]
    expect_shape("old_a", old_a, (*old_c.shape[:-1], 1 if old_a.shape[-1] == 1 else n))
    expect_shape("new_a", new_a, old_a.shape)
    expect_shape("new_c", new_c, old_c.shape)
    if use_native(backend, old_a, old_c, new_a, new_c):
        states = [single(tensor) for tensor in (old_a, old_c, new_a, new_c)]
        to_old, to_new = _needs_grad(*states[:2]), _needs_grad(*states[2:])
        value: Tensor = _ops.distance(*states, _ops.KINDS[kind], to_old, to_new)[0]
        return value
    return _reference.fused_distance(old_a, old_c, new_a, new_c, kind)


def _needs_grad(a: Tensor, c: Tensor) -> bool:
    return torch.is_grad_enabled() and (a.requires_grad or c.requires_grad)
