"""Residual addition and RMSNorm in one pass."""

from __future__ import annotations

from torch import Tensor

from infssm.ops import reference as _reference
from infssm.ops import registered as _ops
from infssm.ops.backend import choose, maybe_single, single
from infssm.ops.checks import expect_channels, expect_floats, expect_shape


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, *, eps: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The normed sum and the sum itself, which is the next residual.

    x, residual: [..., channels]; weight: [channels]. Returns `(normed, new_residual)`: normed in x's dtype,
    `new_residual = x + residual` in at least float32.
    """
    expect_floats(("x", "residual", "weight"), (x, residual, weight))
    expect_channels("x", x)
    expect_shape("weight", weight, x.shape[-1:])
    expect_shape("residual", residual, x.shape)
    chosen = choose(backend, x, residual, weight)
    if chosen == "reference":
        return _reference.add_rms_norm(x, residual, weight, eps)
    normed, total, _ = _ops.norm(single(x), maybe_single(residual), single(weight), eps, chosen == "triton")
    return normed.to(x.dtype), single(x) if residual is None else total
