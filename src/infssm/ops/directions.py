"""The directions of a selective layer in one call: convolution, projections and scan of each, their outputs added.

The same operations one by one are what `models` runs wherever this does not serve. One call has one node in autograd's
graph, writes every gradient where it belongs (the halves of `xz`, the columns of the projection) and adds the
directions in the kernels, so nothing is copied, split or joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.ops.conv import ConvInputs
from infssm.ops.library import define, flat, native, rows
from infssm.ops.scan import KernelOutputs, ScanInputs, saved_shape


class DirectionWeights(NamedTuple):
    """Parameters of one direction; x_proj has rows for delta (rank), B (n) and C (n), in this order.

    conv: [channels, 1, width]; conv_bias, dt_bias, D: [channels]; x_proj: [rank + 2 n, channels]; dt_proj:
    [channels, rank]; A_log: [channels, n] with A = -exp(A_log).
    """

    conv: Tensor
    conv_bias: Tensor
    x_proj: Tensor
    dt_proj: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor


class DirectionStates(NamedTuple):
    """Results of one direction's scan: mean states as of `ScanStates`, and its B and C.

    a: [batch, tokens, n]; delta: [batch, tokens]; low: [batch, tokens, rank], what dt_proj reads; b, c:
    [batch, tokens, n].
    """

    a: Tensor
    delta: Tensor
    low: Tensor
    b: Tensor
    c: Tensor


def scan_directions(
    xz: Tensor, weights: Sequence[Tensor], reverse: Sequence[bool], *, scale: float, states: bool
) -> tuple[Tensor, list[DirectionStates]]:
    """Sum over the directions of `scale * scan(conv(x))`, gated by z; xz: [batch, tokens, 2 channels] holds x, then z.

    weights: those of `DirectionWeights` of every direction, one after the other; all float32 CPU tensors (see
    `can_fuse`). Returns y: [batch, tokens, channels], and the states of each direction if requested.
    """
    y, *parts = _directions(xz, reverse, scale, states, torch.is_grad_enabled(), weights)
    found = []
    for i in range(len(reverse) if states else 0):
        projected, (a, delta) = parts[_KEPT * i], parts[_KEPT * len(reverse) + 2 * i :][:2]
        rank, n = weights[_FIELDS * i + 3].shape[1], weights[_FIELDS * i + 5].shape[1]
        low, b, c = projected.split_with_sizes([rank, n, n], dim=-1)
        found.append(DirectionStates(a, delta, low, b, c))
    return y, found


class _Kept(NamedTuple):
    """Intermediate values of one direction, from which its backward starts; all but `A` [batch, tokens, ...].

    The mean states are not among it: a checkpoint compares what forward and recomputation save, and only one of the two
    may be recorded.
    """

    projected: Tensor
    u: Tensor
    delta: Tensor
    A: Tensor
    saved: Tensor


_FIELDS, _KEPT = len(DirectionWeights._fields), len(_Kept._fields)


def _ways(weights: Sequence[Tensor]) -> list[DirectionWeights]:
    whole = [*map(Tensor.contiguous, weights)]
    return [DirectionWeights(*whole[i : i + _FIELDS]) for i in range(0, len(whole), _FIELDS)]


def _halves(xz: Tensor) -> tuple[Tensor, Tensor]:
    channels = xz.shape[2] // 2
    return xz[..., :channels], xz[..., channels:]


def _scan_inputs(z: Tensor, way: DirectionWeights, kept: _Kept, reverse: bool) -> ScanInputs:
    rank, n = way.dt_proj.shape[1], way.A_log.shape[1]
    _, B, C = kept.projected.unsqueeze(2).split_with_sizes([rank, n, n], dim=-1)
    return ScanInputs(kept.u, kept.delta, kept.A, B, C, way.D, z, way.dt_bias, True, reverse)


def _outputs(xz: Tensor, *args: Any) -> list[Tensor]:
    """Outputs as the kernel writes them, uninitialised."""
    *_, states, save, weights = args
    batch, tokens, channels = *xz.shape[:2], xz.shape[2] // 2
    y = xz.new_empty(batch, tokens, channels)
    means: list[Tensor] = []
    kept: list[Tensor] = []
    for way in _ways(weights):
        n = way.A_log.shape[1]
        saved = xz.new_empty(saved_shape(y.shape, 1, n) if save else 0)
        projected = xz.new_empty(batch, tokens, way.x_proj.shape[0])
        kept += _Kept(projected, torch.empty_like(y), torch.empty_like(y), torch.empty_like(way.A_log), saved)
        means += [xz.new_empty(batch, tokens, n), xz.new_empty(batch, tokens)]
    return [y, *(kept if states or save else ()), *(means if states else ())]


def _kernel(
    xz: Tensor, reverse: Sequence[bool], scale: float, states: bool, save: bool, weights: Sequence[Tensor]
) -> list[Tensor]:
    """y; with `states` or `save` what each direction keeps; with `states` the mean states of each."""
    (x, z), threads = _halves(rows(xz)), torch.get_num_threads()
    kept: list[Tensor] = []
    means: list[Tensor] = []
    y = x.new_empty(x.shape)
    for i, way in enumerate(_ways(weights)):
        n, u = way.A_log.shape[1], torch.empty_like(y)
        native.conv_forward(ConvInputs(x, way.conv.squeeze(1), way.conv_bias, True, reverse[i]), u, threads)
        projected = F.linear(u, way.x_proj)
        delta = F.linear(projected[..., : way.dt_proj.shape[1]], way.dt_proj)
        saved = x.new_empty(saved_shape(y.shape, 1, n) if save else 0)
        formed = _Kept(projected, u, delta, torch.exp(way.A_log).neg_(), saved)
        found = KernelOutputs(y, None, None, None, None)
        if states:
            a, mean_delta = x.new_empty(*x.shape[:2], n), x.new_empty(x.shape[:2])
            means += [a, mean_delta]
            found = KernelOutputs(y, None, a.unsqueeze(2), mean_delta.unsqueeze(2), None)
        native.scan_forward(_scan_inputs(z, way, formed, reverse[i]), found, saved, threads, scale, i > 0)
        if states or save:
            kept += formed
    return [y, *kept, *means]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    xz, ctx.reverse, ctx.scale, states, _, weights = inputs
    kept = output[1 : 1 + len(ctx.reverse) * _KEPT]
    # Of what is kept, `projected` comes first; it holds the B and C of the states.
    ctx.mark_non_differentiable(*([x for i, x in enumerate(kept) if i % _KEPT] if states else kept))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(xz, *weights, *kept)


def _backward(ctx: Any, grad_y: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
    xz, *saved = ctx.saved_tensors
    count = len(ctx.reverse)
    weights, kept, needs = saved[: count * _FIELDS], saved[count * _FIELDS :], ctx.needs_input_grad[5:]
    of_states = [*grads[: count * _KEPT : _KEPT], *grads[count * _KEPT :]]  # `projected`, then the mean states
    dxz, *found = _directions_backward(xz, ctx.reverse, ctx.scale, grad_y, of_states, needs, kept, weights)
    wanted = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return dxz, None, None, None, None, *wanted


def _input_grads(xz: Tensor, *args: Any) -> list[Tensor]:
    """Gradients as the backward kernel writes them, uninitialised."""
    *_, needs, _, weights = args
    found = [torch.empty_like(xz, memory_format=torch.contiguous_format)]
    for i, (weight, need) in enumerate(zip(weights, needs, strict=True)):
        found.append(weight.new_empty(weight.shape if need or i % _FIELDS not in _PROJECTIONS else 0))
    return found


_PROJECTIONS = [DirectionWeights._fields.index(name) for name in ("x_proj", "dt_proj")]


def _backward_kernel(
    xz: Tensor,
    reverse: Sequence[bool],
    scale: float,
    grad_y: Tensor | None,
    of_states: Sequence[Tensor | None],
    needs: Sequence[bool],
    kept: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of xz and of every weight; empty for a projection's that is not needed."""
    threads, count = torch.get_num_threads(), len(reverse)
    dxz = torch.empty_like(xz, memory_format=torch.contiguous_format)
    (x, z), (dx, dz), channels = _halves(rows(xz)), _halves(dxz), xz.shape[2] // 2
    grad_y = torch.zeros_like(x) if grad_y is None else rows(grad_y)
    outputs = [dxz]
    for i, way in enumerate(_ways(weights)):
        formed = _Kept(*kept[_KEPT * i : _KEPT * (i + 1)])
        need_x_proj, need_dt_proj = (needs[_FIELDS * i + place] for place in _PROJECTIONS)
        like = (way.conv, way.conv_bias, way.dt_bias, way.A_log, way.D)
        dconv, dconv_bias, dt_bias, dA, dD = map(torch.empty_like, like)
        dprojected, du, ddelta = map(torch.empty_like, (formed.projected, formed.u, formed.delta))
        rank, n = way.dt_proj.shape[1], way.A_log.shape[1]
        _, dB, dC = dprojected.unsqueeze(2).split_with_sizes([rank, n, n], dim=-1)
        gradients = ScanInputs(du, ddelta, dA, dB, dC, dD, dz, dt_bias)
        grad_a, grad_delta = of_states[count + 2 * i :][:2] or (None, None)
        of_means = [grad if grad is None else flat(grad).unsqueeze(2) for grad in (grad_a, grad_delta)]
        of_outputs = KernelOutputs(grad_y, None, of_means[0], of_means[1], None)
        inputs = _scan_inputs(z, way, formed, reverse[i])
        native.scan_backward(inputs, formed.saved, of_outputs, gradients, threads, scale, i > 0)
        dA.mul_(formed.A)  # A = -exp(A_log) is its own derivative
        by_delta, columns = ddelta.view(-1, channels), dprojected.view(-1, rank + 2 * n)
        # Transposed, so that the long dimension lies inside: MKL takes a fourth of the time for few columns (rank).
        columns[:, :rank] = torch.mm(way.dt_proj.t(), by_delta.t()).t()
        if (grad_projected := of_states[i]) is not None:
            dprojected += grad_projected
        du.view(-1, channels).addmm_(columns, way.x_proj)
        conv = ConvInputs(x, way.conv.squeeze(1), way.conv_bias, True, reverse[i])
        native.conv_backward(conv, du, dx, dconv.squeeze(1), dconv_bias, threads, i > 0)
        low = formed.projected.view(-1, rank + 2 * n)[:, :rank]
        dx_proj = torch.mm(columns.t(), formed.u.view(-1, channels)) if need_x_proj else dA.new_empty(0)
        ddt_proj = torch.mm(low.t(), by_delta).t() if need_dt_proj else dA.new_empty(0)
        # Copied to the strides of the parameter, which DistributedDataParallel asks for even where a size is 1.
        ddt_proj = ddt_proj.clone(memory_format=torch.contiguous_format)
        outputs += DirectionWeights(dconv, dconv_bias, dx_proj, ddt_proj, dt_bias, dA, dD)
    return outputs


_directions_backward = define(
    "directions_backward(Tensor xz, bool[] reverse, float scale, Tensor? grad_y, Tensor?[] of_states, bool[] needs,"
    " Tensor[] kept, Tensor[] weights) -> Tensor[]",
    _backward_kernel,
    _input_grads,
)
_directions = define(
    "directions(Tensor xz, bool[] reverse, float scale, bool states, bool save, Tensor[] weights) -> Tensor[]",
    _kernel,
    _outputs,
    setup=_setup,
    backward=_backward,
)
