"""Residual addition and RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, flat, given, new
from infssm.kernels._ops.norm import _norm_backward_fake, _norm_fake, _norm_setup
from infssm.kernels._triton._launch import DEVICES, power_of_two, run

# Rows whose share of the gradient of the weight one program adds up.
_ROWS = 32


def _sizes(channels: int) -> dict[str, int]:
    cols = power_of_two(channels)
    return {"COLS": cols, "warps": min(16, max(1, cols // 256))}


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.norm import forward

    normed, total, scale = outputs = _norm_fake(x, residual, weight, eps)
    tensors = (flat(x), flat(residual), flat(weight), normed, given(total), scale)
    run(forward, scale.numel(), normed, *tensors, x.shape[-1], eps, **_sizes(x.shape[-1]))
    return outputs


def _norm_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_normed, grad_total, _ = grads
    dx, dweight = norm_backward(*ctx.saved_tensors, grad_normed, grad_total)
    return dx, dx if ctx.needs_input_grad[1] else None, dweight, None


def _norm_backward(*args: Any) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.norm import backward

    total, weight, scale, grad_normed, grad_total = args
    dx, dweight = outputs = _norm_backward_fake(*args)
    grad_normed = torch.zeros_like(dx) if grad_normed is None else grad_normed
    parts = -(-scale.numel() // _ROWS)
    weight_parts = new(dx, parts, *dweight.shape)
    tensors = (flat(total), flat(weight), flat(scale), flat(grad_normed), flat(given(grad_total)), dx, weight_parts)
    sizes = _sizes(weight.shape[0])
    run(backward, parts, dx, *tensors, scale.numel(), weight.shape[0], ROWS=_ROWS, **sizes)
    torch.sum(weight_parts, 0, out=dweight)
    return outputs


norm = define(
    "triton_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _norm,
    _norm_fake,
    DEVICES,
)
norm_backward = define(
    "triton_norm_backward(Tensor total, Tensor weight, Tensor scale, Tensor? grad_normed, Tensor? grad_total)"
    " -> (Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
    DEVICES,
)
differentiate("triton_norm", _norm_autograd, _norm_setup)
