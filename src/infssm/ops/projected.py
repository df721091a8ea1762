"""A Mamba-2 layer between its projections in one call: convolution, scan of the heads, gate.

The same operations one by one are what `models` runs wherever this does not serve. One call has one node in autograd's
graph and writes every gradient where it belongs, so nothing is split or joined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infssm.ops.directions import is_plain
from infssm.ops.heads import LEAST_STATES
from infssm.ops.records import ConvInputs, HeadInputs
from infssm.ops.registered.heads import saved_shape
from infssm.ops.registered.library import given, native, new, rows


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


class Between(NamedTuple):
    """What the forward between the projections leaves for its backward.

    projected, convolved: as of `scan_projected`; A: [heads]; plain: y before skip and gate; saved: the chunks' states.
    """

    projected: Tensor
    convolved: Tensor
    A: Tensor
    plain: Tensor | None
    saved: Tensor | None


def between_forward(
    projected: Tensor, weights: HeadWeights, inner: int, groups: int, *, save: bool
) -> tuple[Tensor, Between]:
    """y gated: [batch, tokens, inner], and what the backward needs, all of it only with `save`."""
    projected, threads = rows(projected), torch.get_num_threads()
    convolved = new(projected, *projected.shape[:2], weights.conv.shape[0])
    A = weights.A_log.exp().neg_()
    x = _head_inputs(projected, convolved, A, weights, inner, groups)
    y = new(projected, *x.u.shape)
    plain, saved = (new(projected, *shape) if save else None for shape in (x.u.shape, saved_shape(x)))
    native.ssd_forward(x, y, plain, given(saved), threads, _conv_inputs(projected, weights, inner), convolved)
    return y, Between(projected, convolved, A, plain, saved)


def between_backward(
    kept: Between, weights: HeadWeights, inner: int, groups: int, grad_y: Tensor, grad_convolved: Tensor | None
) -> tuple[Tensor, HeadWeights]:
    """Gradients of `projected` and of the weights."""
    projected, convolved, A, plain, saved = kept
    x, threads = _head_inputs(projected, convolved, A, weights, inner, groups), torch.get_num_threads()
    dprojected = torch.empty_like(projected)
    # The gradient of what was convolved lies where that of the convolution's input will: it is read first.
    dconvolved = _conv_inputs(dprojected, weights, inner).x
    dA, dD, dbias = (torch.empty_like(tensor) for tensor in weights[2:])
    found = _head_inputs(dprojected, dconvolved, dA, weights._replace(D=dD, dt_bias=dbias), inner, groups)
    dconv, dconv_bias = torch.empty_like(weights.conv), new(projected, weights.conv.shape[0])
    inputs, of_weights = _conv_inputs(projected, weights, inner), (dconv.squeeze(1), dconv_bias)
    at_once = (inputs, dconvolved, *of_weights) if grad_convolved is None else (None,) * 4
    native.ssd_backward(x, plain, given(saved), rows(grad_y), found, threads, *at_once)
    if grad_convolved is not None:
        dconvolved += grad_convolved
        native.conv_backward(inputs, dconvolved, dconvolved, *of_weights, threads, False)
    return dprojected, HeadWeights(dconv, dconv_bias, dA.mul_(A), dD, dbias)


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: int, groups: int, save: bool, projected: Tensor, *flat: Any) -> tuple[Tensor, ...]:
        y, kept = between_forward(projected, HeadWeights(*flat), inner, groups, save=save)
        ctx.sizes = inner, groups
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat, *kept)
        return y, kept.convolved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_convolved: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        weights, kept = HeadWeights(*saved[: len(_FIELDS)]), Between(*saved[len(_FIELDS) :])
        inner, groups = ctx.sizes
        if grad_y is None:
            grad_y = new(kept.projected, *kept.projected.shape[:2], inner).zero_()
        dprojected, found = between_backward(kept, weights, inner, groups, grad_y, grad_convolved)
        return None, None, None, dprojected, *found


_FIELDS = HeadWeights._fields


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
