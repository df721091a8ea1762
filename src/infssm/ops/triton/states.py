"""Mean states without a scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from infssm.ops.library import new
from infssm.ops.triton._launch import Cut, arranged, run, strides, turned

# Tokens whose share of dA one program adds up.
_ROWS = 64


def _inputs(delta: Tensor, A: Tensor, bias: Tensor | None, groups: int) -> tuple[dict[str, Any], Cut]:
    """The inputs of both kernels, by the names of their parameters, and the cut."""
    batch, tokens, channels = delta.shape
    cut = Cut(batch, tokens, groups, channels, A.shape[1])
    return {"delta": delta, "A": turned(A), "bias": bias} | strides("delta", delta) | cut.sizes, cut


def forward(delta: Tensor, A: Tensor, bias: Tensor | None, groups: int, softplus: bool, means: Sequence[Any]) -> None:
    """Fill the means of a, delta and zoh that are not None."""
    from infssm.ops.triton.kernels.states import forward as kernel

    inputs, cut = _inputs(delta, A, bias, groups)
    named = dict(zip(("a_mean", "delta_mean", "zoh_mean"), means, strict=True))
    programs = delta.shape[0] * delta.shape[1] * groups
    run(kernel, programs, delta, *arranged(kernel, inputs, named), SOFTPLUS=softplus, **cut.constants)


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

    inputs, cut = _inputs(delta, A, bias, groups)
    ddelta, dA, dbias = found
    parts = -(-delta.shape[0] * delta.shape[1] // _ROWS)
    by_part = [None if grad is None else new(dA, parts, *grad.shape) for grad in (dA.mT, dbias)]
    given = dict(zip(("grad_a", "grad_delta", "grad_zoh"), grads, strict=True))
    wanted = dict(zip(("ddelta", "dA", "dbias"), (ddelta, *by_part), strict=True))
    arguments = arranged(kernel, inputs, given, wanted)
    constants = {"SOFTPLUS": softplus, "ROWS": _ROWS} | cut.constants
    run(kernel, parts * inputs["groups"] * cut.blocks, dA, *arguments, **constants)
    for grad, part in zip((dA.mT, dbias), by_part, strict=True):
        if grad is not None and part is not None:
            grad.copy_(part.sum(0))
