"""Distances between old and new states (mean transition, C, B) in one pass, soft-normalisation inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops import registered as _ops
from infssm.ops.backend import choose, maybe_single
from infssm.ops.checks import expect_shape
from infssm.ops.distances import KINDS, Kind, Pair


def fused_distance(
    old_a: Tensor,
    old_c: Tensor,
    new_a: Tensor,
    new_c: Tensor,
    *,
    kind: str,
    old_b: Tensor | None = None,
    new_b: Tensor | None = None,
    soft_normalize: bool = True,
    backend: str | None = None,
    **options: Any,
) -> Tensor:
    """Squared distance per token, `[...]`, of the soft-normalised states.

    soft_normalize: the states are raw; False takes them as they are, poles inside the unit disc.

    old_a, new_a: [..., n] or [..., 1] (scalar transition); old_c, new_c: [..., n]; old_b, new_b: [..., n], which
    `output` needs and the others ignore. Differentiable in all of them. The kinds are those of the table in
    `infssm.ops.distances`. Real float32 states without options are served by kernels, where the kind has one;
    all others (float64, complex) by its formula in PyTorch. A pole outside the unit disc gives NaN for its token.
    options: options of the kind, such as ``equality`` of `simplified`.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} has no fused kernel, expected one of {', '.join(KINDS)}")
    row = KINDS[kind]
    if "b" in row.sees:
        pair = Pair(old_a, old_c, new_a, new_c, old_b, new_b, soft=soft_normalize)
    else:
        pair = Pair(old_a, old_c, new_a, new_c, soft=soft_normalize)
    _check(row, pair)
    tensors = pair.tensors
    found = choose(backend, *tensors)
    if found not in row.backends or _needs_formula(row, options):
        return row.reference(pair, **options)
    to_old, to_new = (_needs_grad(*side) for side in pair.sides)
    floats = map(maybe_single, tensors)
    value: Tensor = _ops.distance(*floats, kind, soft_normalize, to_old, to_new, found == "triton")[0]
    return value


def _check(row: Kind, pair: Pair) -> None:
    n = pair.old_c.shape[-1]
    if n == 0:
        raise ConfigError("distance: the systems have no states (n = 0); there is nothing to compare")
    shape = pair.old_c.shape
    if not pair.old_a.shape == pair.new_a.shape == pair.new_c.shape == shape:
        expect_shape("old_a", pair.old_a, (*shape[:-1], 1 if pair.old_a.shape[-1] == 1 else n))
        expect_shape("new_a", pair.new_a, pair.old_a.shape)
        expect_shape("new_c", pair.new_c, shape)
    if "b" in row.sees:
        if pair.old_b is None or pair.new_b is None:
            raise ConfigError(f"kind={row.name!r} needs old_b and new_b")
        expect_shape("old_b", pair.old_b, pair.old_c.shape)
        expect_shape("new_b", pair.new_b, pair.old_c.shape)


def _needs_formula(row: Kind, options: dict[str, Any]) -> bool:
    """Whether no kernel can serve the call: they have no options, and no `torch.func` transforms."""
    return not row.has_defaults(options) or torch._C._are_functorch_transforms_active()


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
