"""A Mamba-2 layer between its projections in one call: convolution, scan of the heads, gate.

The same operations one by one are what `models` runs wherever this does not serve. One call has one node in autograd's
graph and writes every gradient where it belongs, so nothing is split or joined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infssm.kernels._ops.heads import saved_shape
from infssm.kernels._ops.library import native, new, rows
from infssm.kernels.directions import is_plain
from infssm.kernels.heads import LEAST_STATES
from infssm.kernels.records import ConvInputs, HeadInputs


class HeadWeights(NamedTuple):
    """Parameters of the layer; the convolution is over the channels of x, then those of B, then those of C.

    conv: [channels, 1, width]; conv_bias: [channels] (None is not served); A_log, D, dt_bias: [heads], A = -exp(A_log).
    """

    conv: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor


def can_scan_projected(projected: Tensor, weights: HeadWeights, n: int) -> bool:
    """Whether `scan_projected` serves: compiled kernels, plain float32 CPU tensors, and nothing tracing the model."""
    given = [tensor for tensor in weights if tensor is not None]
    return n >= LEAST_STATES["cpu"] and len(given) == len(weights) and is_plain([projected, *given])


def scan_projected(projected: Tensor, weights: HeadWeights, *, inner: int, groups: int) -> tuple[Tensor, Tensor]:
    """y gated: [batch, tokens, inner], and what the convolution made of x, B and C: [batch, tokens, channels].

    projected: [batch, tokens, inner + channels + heads] holds z, the convolution's input, and delta.
    """
    y, convolved = _Projected.apply(inner, groups, torch.is_grad_enabled(), projected, *weights)  # type: ignore[no-untyped-call]
    return y, convolved


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: int, groups: int, save: bool, projected: Tensor, *flat: Any) -> tuple[Tensor, ...]:
        projected, weights, threads = rows(projected), HeadWeights(*flat), torch.get_num_threads()
        convolved = new(projected, *projected.shape[:2], weights.conv.shape[0])
        native.conv_forward(_conv_inputs(projected, weights, inner), convolved, threads)
        A = weights.A_log.exp().neg_()
        x = _head_inputs(projected, convolved, A, weights, inner, groups)
        y = new(projected, *x.u.shape)
        plain, saved = (new(projected, *shape) if save else None for shape in (x.u.shape, saved_shape(x)))
        native.heads_forward(x, y, plain, saved if saved is not None and saved.numel() else None, threads)
        ctx.sizes = inner, groups
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(projected, *flat, convolved, A, plain, saved)
        return y, convolved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_convolved: Tensor | None) -> tuple[Any, ...]:
        (inner, groups), threads = ctx.sizes, torch.get_num_threads()
        projected, *flat, convolved, A, plain, saved = ctx.saved_tensors
        weights = HeadWeights(*flat)
        x = _head_inputs(projected, convolved, A, weights, inner, groups)
        dprojected, dconvolved = torch.empty_like(projected), torch.empty_like(convolved)
        dA, dD, dbias = (torch.empty_like(tensor) for tensor in weights[2:])
        found = _head_inputs(dprojected, dconvolved, dA, weights._replace(D=dD, dt_bias=dbias), inner, groups)
        grad_y = new(projected, *x.u.shape).zero_() if grad_y is None else rows(grad_y)
        native.heads_backward(x, plain, saved if saved.numel() else None, grad_y, found, threads)
        if grad_convolved is not None:
            dconvolved += grad_convolved
        dconv, dconv_bias = torch.empty_like(weights.conv), new(projected, weights.conv.shape[0])
        inputs, target = _conv_inputs(projected, weights, inner), _conv_inputs(dprojected, weights, inner).x
        native.conv_backward(inputs, dconvolved, target, dconv.squeeze(1), dconv_bias, threads, False)
        return None, None, None, dprojected, dconv, dconv_bias, dA.mul_(A), dD, dbias


def _conv_inputs(projected: Tensor, weights: HeadWeights, inner: int) -> ConvInputs:
    x = projected[..., inner : inner + weights.conv.shape[0]]
    return ConvInputs(x, weights.conv.squeeze(1), weights.conv_bias)


def _head_inputs(
    projected: Tensor, convolved: Tensor, A: Tensor, weights: HeadWeights, inner: int, groups: int
) -> HeadInputs:
    u, bc = convolved[..., :inner], convolved[..., inner:]
    B, C = torch.unflatten(bc, -1, (2, groups, -1)).unbind(2)
    z, delta = projected[..., :inner], projected[..., projected.shape[-1] - A.shape[0] :]
    return HeadInputs(u, delta, A, B, C, weights.D, z, weights.dt_bias, True)
