"""Residual addition and RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.registered.library import define, differentiate, flat, given, matrix, native, new
from infssm.ops.triton import norm as _triton


def _norm_fake(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    total = new(x, 0) if residual is None else new(x, *x.shape)
    return new(x, *x.shape), total, new(x, *x.shape[:-1])


def _norm(*args: Any) -> tuple[Tensor, ...]:
    x, residual, weight, eps, _ = args
    normed, total, scale = outputs = _norm_fake(*args)
    native.norm_forward(
        *(matrix(x), matrix(residual), flat(weight), eps, torch.get_num_threads()),
        *(matrix(normed), matrix(given(total)), scale.view(-1)),
    )
    return outputs


def _triton_norm(*args: Any) -> tuple[Tensor, ...]:
    x, residual, weight, eps, _ = args
    outputs = _norm_fake(*args)
    _triton.forward(flat(x), flat(residual), flat(weight), eps, *map(given, outputs))
    return outputs


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _, triton = inputs
    _, total, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else total, weight, scale)
    ctx.triton = triton


def _norm_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_normed, grad_total, _ = grads
    dx, dweight = norm_backward(*ctx.saved_tensors, grad_normed, grad_total, ctx.triton)
    return dx, dx if ctx.needs_input_grad[1] else None, dweight, None, None


def _norm_backward_fake(total: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return new(total, *total.shape), new(total, *weight.shape)


def _norm_backward(*args: Any) -> tuple[Tensor, ...]:
    total, weight, scale, grad_normed, grad_total, _ = args
    dx, dweight = found = _norm_backward_fake(*args)
    grad_normed = torch.zeros_like(dx) if grad_normed is None else grad_normed
    native.norm_backward(
        *(matrix(total), flat(weight), torch.get_num_threads(), scale.contiguous().view(-1)),
        *(matrix(grad_normed), matrix(given(grad_total)), matrix(dx), dweight),
    )
    return found


def _triton_backward(*args: Any) -> tuple[Tensor, ...]:
    total, weight, scale, grad_normed, grad_total, _ = args
    found = _norm_backward_fake(*args)
    grad_normed = torch.zeros_like(found[0]) if grad_normed is None else grad_normed
    grads = flat(grad_normed), flat(given(grad_total))
    _triton.backward(flat(total), flat(weight), flat(scale), *grads, *found)
    return found


norm = define(
    "norm(Tensor x, Tensor? residual, Tensor weight, float eps, bool triton) -> (Tensor, Tensor, Tensor)",
    _norm,
    _norm_fake,
    triton=_triton_norm,
)
norm_backward = define(
    "norm_backward(Tensor total, Tensor weight, Tensor scale, Tensor? grad_normed, Tensor? grad_total, bool triton)"
    " -> (Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
    triton=_triton_backward,
)
differentiate("norm", _norm_autograd, _norm_setup)
