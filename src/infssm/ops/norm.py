"""Residual addition and RMSNorm in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.backend import choose, in_float32
from infssm.ops.checks import compute_dtype, expect_channels, expect_shape
from infssm.ops.library import define, flat, given, native
from infssm.ops.triton import norm as _triton


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, *, eps: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The normed sum and the sum itself, which is the next residual.

    x, residual: [..., channels]; weight: [channels]. Returns `(normed, new_residual)`: normed in x's dtype,
    `new_residual = x + residual` in at least float32.
    """
    chosen = choose(backend, x, residual, weight, names=("x", "residual", "weight"))
    if chosen != "cpu":  # the compiled module checks the shapes itself
        expect_channels("x", x)
        expect_shape("weight", weight, x.shape[-1:])
        expect_shape("residual", residual, x.shape)
    if chosen == "reference":
        return _reference(x, residual, weight, eps)
    added, total, weight = in_float32((x, residual, weight))
    normed, total, _ = norm(added, total, weight, eps, chosen == "triton")
    return normed if x.dtype is torch.float32 else normed.to(x.dtype), added if residual is None else total


def _reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and that sum in at least float32."""
    total = x.to(compute_dtype(x, residual))
    if residual is not None:
        total = total + residual
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype), total


def _outputs(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return x.new_empty(x.shape), total, x.new_empty(x.shape[:-1])


def _kernel(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, triton: bool) -> tuple[Tensor, ...]:
    normed, total, scale = outputs = _outputs(x, residual)
    if triton:
        _triton.forward(flat(x), flat(residual), flat(weight), eps, normed, given(total), scale)
        return outputs
    tensors = (x.contiguous(), flat(residual), weight.contiguous(), eps, torch.get_num_threads())
    native.norm_forward(*tensors, normed, total, scale)
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _, ctx.triton = inputs
    _, total, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else total, weight, scale)


def _backward(ctx: Any, grad_normed: Tensor | None, grad_total: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    dx, dweight = norm_backward(*ctx.saved_tensors, grad_normed, grad_total, ctx.triton)
    return dx, dx if ctx.needs_input_grad[1] else None, dweight, None, None


def _input_grads(total: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return total.new_empty(total.shape), total.new_empty(weight.shape)


def _backward_kernel(
    total: Tensor, weight: Tensor, scale: Tensor, grad_normed: Tensor | None, grad_total: Tensor | None, triton: bool
) -> tuple[Tensor, ...]:
    dx, dweight = found = _input_grads(total, weight)
    grad_normed = torch.zeros_like(dx) if grad_normed is None else grad_normed
    if triton:
        grads = flat(grad_normed), flat(given(grad_total))
        _triton.backward(flat(total), flat(weight), flat(scale), *grads, dx, dweight)
        return found
    tensors = (total.contiguous(), weight.contiguous(), torch.get_num_threads(), scale.contiguous())
    native.norm_backward(*tensors, grad_normed.contiguous(), flat(grad_total), dx, dweight)
    return found


norm_backward = define(
    "norm_backward(Tensor total, Tensor weight, Tensor scale, Tensor? grad_normed, Tensor? grad_total, bool triton)"
    " -> (Tensor, Tensor)",
    _backward_kernel,
    _input_grads,
)
norm = define(
    "norm(Tensor x, Tensor? residual, Tensor weight, float eps, bool triton) -> (Tensor, Tensor, Tensor)",
    _kernel,
    _outputs,
    setup=_setup,
    backward=_backward,
)
