"""Mean states without a scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from infssm.ops.triton._launch import Cut, add_up, parts_of, run, strides, turned

# Tokens whose share of dA one program adds up.
_ROWS = 64


def _arguments(
    delta: Tensor, A: Tensor, bias: Tensor | None, groups: int, softplus: bool
) -> tuple[Cut, dict[str, Any]]:
    """The cut, and what both kernels take."""
    batch, tokens, channels = delta.shape
    cut = Cut(batch, tokens, groups, channels, A.shape[1])
    found = {"delta": delta, "A": turned(A), "bias": bias, "SOFTPLUS": softplus, "ROWS": _ROWS}
    return cut, found | strides("delta", delta) | cut.sizes


def forward(delta: Tensor, A: Tensor, bias: Tensor | None, groups: int, softplus: bool, means: Sequence[Any]) -> None:
    """Fill the means of a, delta and zoh that are not None."""
    from infssm.ops.triton.kernels.states import forward as kernel

    cut, inputs = _arguments(delta, A, bias, groups, softplus)
    named = dict(zip(("a_mean", "delta_mean", "zoh_mean"), means, strict=True))
    run(kernel, delta.shape[0] * delta.shape[1] * groups, delta, inputs, named, warps=cut.warps)


def backward(
    delta: Tensor,
    A: Tensor,
    bias: Tensor | None,
    groups: int,
    softplus: bool,
    grads: Sequence[Any],
    found: Sequence[Any],
) -> None:
    """Fill the gradients of delta, A and bias that are not None from those of the means of a, delta and zoh."""
    from infssm.ops.triton.kernels.states import backward as kernel

    cut, inputs = _arguments(delta, A, bias, groups, softplus)
    ddelta, dA, dbias = found
    parts = -(-delta.shape[0] * delta.shape[1] // _ROWS)
    of_A, of_bias = parts_of(dA.mT, parts), parts_of(dbias, parts)
    given = dict(zip(("grad_a", "grad_delta", "grad_zoh"), grads, strict=True))
    wanted = {"ddelta": ddelta, "dA": of_A, "dbias": of_bias}
    run(kernel, parts * groups * cut.blocks, dA, inputs, given, wanted, warps=cut.warps)
    add_up(dA.mT, of_A)
    add_up(dbias, of_bias)
