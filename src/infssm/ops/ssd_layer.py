"""A Mamba-2 layer between its projections in one call: convolution, scan of the heads, gate.

The same operations one by one are what `models` runs wherever this does not serve. One call has one node in autograd's
graph and writes every gradient where it belongs, so nothing is split or joined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from infssm.ops.conv import ConvInputs
from infssm.ops.library import define, native, new, rows
from infssm.ops.scan import ScanInputs
from infssm.ops.ssd import saved_shape


class SsdWeights(NamedTuple):
    """Parameters of the layer; the convolution is over the channels of x, then those of B, then those of C.

    conv: [channels, 1, width]; conv_bias: [channels]; A_log, D, dt_bias: [heads], A = -exp(A_log).
    """

    conv: Tensor
    conv_bias: Tensor
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor


def scan_projected(projected: Tensor, weights: SsdWeights, *, inner: int, groups: int) -> tuple[Tensor, Tensor]:
    """y gated: [batch, tokens, inner], and what the convolution made of x, B and C: [batch, tokens, channels].

    projected: [batch, tokens, inner + channels + heads] holds z, the convolution's input, and delta. All are float32
    CPU tensors (see `can_fuse`).
    """
    y, convolved, *_ = _ssd_layer(projected, *weights, inner, groups, torch.is_grad_enabled())
    return y, convolved


def _conv_inputs(projected: Tensor, weights: SsdWeights, inner: int) -> ConvInputs:
    x = projected[..., inner : inner + weights.conv.shape[0]]
    return ConvInputs(x, weights.conv.squeeze(1), weights.conv_bias)


def _ssd_inputs(
    projected: Tensor, convolved: Tensor, A: Tensor, weights: SsdWeights, inner: int, groups: int
) -> ScanInputs:
    u, bc = convolved[..., :inner], convolved[..., inner:]
    B, C = torch.unflatten(bc, -1, (2, groups, -1)).unbind(2)
    z, delta = projected[..., :inner], projected[..., projected.shape[-1] - A.shape[0] :]
    return ScanInputs(u, delta, A, B, C, weights.D, z, weights.dt_bias, True)


def _outputs(projected: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """y, what was convolved, A, y before skip and gate, and the chunks' states; the last two empty without `save`."""
    *tensors, inner, groups, save = args
    weights = SsdWeights(*tensors)
    convolved = new(projected, *projected.shape[:2], weights.conv.shape[0])
    A = projected.new_empty(weights.A_log.shape)
    x = _ssd_inputs(projected, convolved, A, weights, inner, groups)
    y = new(projected, *x.u.shape)
    plain, saved = (new(projected, *shape) if save else new(projected, 0) for shape in (x.u.shape, saved_shape(x)))
    return y, convolved, A, plain, saved


def _kernel(projected: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *tensors, inner, groups, _ = args
    weights, projected = SsdWeights(*map(Tensor.contiguous, tensors)), rows(projected)
    y, convolved, A, plain, saved = outputs = _outputs(projected, *args)
    torch.exp(weights.A_log, out=A).neg_()
    x, conv = _ssd_inputs(projected, convolved, A, weights, inner, groups), _conv_inputs(projected, weights, inner)
    native.ssd_forward(x, y, plain, saved, torch.get_num_threads(), conv, convolved)
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    projected, *weights, inner, groups, _ = inputs
    _, convolved, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(projected, *weights, convolved, *kept)
    ctx.sizes = inner, groups


def _backward(ctx: Any, grad_y: Tensor | None, grad_convolved: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return *_ssd_layer_backward(*ctx.saved_tensors, *ctx.sizes, grad_y, grad_convolved), None, None, None


def _input_grads(projected: Tensor, *args: Any) -> tuple[Tensor, ...]:
    weights = args[: len(SsdWeights._fields)]
    dprojected = torch.empty_like(projected, memory_format=torch.contiguous_format)
    return dprojected, *(weight.new_empty(weight.shape) for weight in weights)


def _backward_kernel(*args: Any) -> tuple[Tensor, ...]:
    projected, *tensors, convolved, A, plain, saved, inner, groups, grad_y, grad_convolved = args
    weights, threads = SsdWeights(*map(Tensor.contiguous, tensors)), torch.get_num_threads()
    dprojected, *found = outputs = _input_grads(projected, *tensors)
    to, projected = SsdWeights(*found), rows(projected)
    x = _ssd_inputs(projected, convolved, A, weights, inner, groups)
    # The gradient of what was convolved lies where that of the convolution's input will: it is read first.
    dconvolved = _conv_inputs(dprojected, weights, inner).x
    gradients = _ssd_inputs(dprojected, dconvolved, to.A_log, to, inner, groups)
    grad_y = new(projected, *projected.shape[:2], inner).zero_() if grad_y is None else rows(grad_y)
    inputs, of_weights = _conv_inputs(projected, weights, inner), (to.conv.squeeze(1), to.conv_bias)
    at_once = (inputs, dconvolved, *of_weights) if grad_convolved is None else (None,) * 4
    native.ssd_backward(x, plain, saved, grad_y, gradients, threads, *at_once)
    if grad_convolved is not None:
        dconvolved += grad_convolved
        native.conv_backward(inputs, dconvolved, dconvolved, *of_weights, threads, False)
    to.A_log.mul_(A)  # A = -exp(A_log) is its own derivative
    return outputs


_WEIGHTS = "Tensor conv, Tensor conv_bias, Tensor A_log, Tensor D, Tensor dt_bias"
_ssd_layer_backward = define(
    f"ssd_layer_backward(Tensor projected, {_WEIGHTS}, Tensor convolved, Tensor A, Tensor plain, Tensor saved,"
    " int inner, int groups, Tensor? grad_y, Tensor? grad_convolved)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _input_grads,
)
_ssd_layer = define(
    f"ssd_layer(Tensor projected, {_WEIGHTS}, int inner, int groups, bool save)"
    " -> (Tensor y, Tensor convolved, Tensor A, Tensor plain, Tensor saved)",
    _kernel,
    _outputs,
    setup=_setup,
    backward=_backward,
)
