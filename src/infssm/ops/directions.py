"""The directions of a selective layer in one call: convolution, projections and scan of each, their outputs added.

The same operations one by one are what `models` runs wherever this does not serve. One call has one node in autograd's
graph, writes every gradient where it belongs (the halves of `xz`, the columns of the projection) and adds the
directions in the kernels, so nothing is copied, split or joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infssm.ops.conv import ConvInputs
from infssm.ops.library import define, flat, native, rows
from infssm.ops.scan import OutputGrads, Outputs, ScanInputs, saved_shape


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
    """What one direction's scan formed: mean states as of `ScanStates`, and its B and C.

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
    `can_fuse`). Returns y: [batch, tokens, channels], and the states of each direction if they were asked for.
    """
    y, *parts = _directions(xz, reverse, scale, states, torch.is_grad_enabled(), weights)
    if not states:
        return y, []
    found = []
    for i in range(len(reverse)):
        (a, delta), (projected, *_) = _parts(parts, len(reverse), i)
        rank, n = weights[_FIELDS * i + 3].shape[1], weights[_FIELDS * i + 5].shape[1]
        low, b, c = torch.split(projected, [rank, n, n], dim=-1)
        found.append(DirectionStates(a.squeeze(2), delta.squeeze(2), low, b, c))
    return y, found


class _Kept(NamedTuple):
    """What one direction forms on its way, of which its backward starts; all but `A` [batch, tokens, ...].

    The mean states are not among it: a checkpoint compares what forward and recomputation save, and only one of the two
    may be recorded.
    """

    projected: Tensor
    u: Tensor
    delta: Tensor
    A: Tensor
    saved: Tensor


_FIELDS, _KEPT = len(DirectionWeights._fields), len(_Kept._fields)
_MEANS = 2  # a and delta, empty where states are not asked for


def _parts(parts: Sequence[Tensor], count: int, i: int) -> tuple[tuple[Tensor, Tensor], _Kept]:
    """The mean states of direction i of `count`, and what it keeps; of the outputs after y."""
    a, delta = parts[i * _MEANS : (i + 1) * _MEANS]
    first = count * _MEANS + i * _KEPT
    return (a, delta), _Kept(*parts[first : first + _KEPT])


def _ways(weights: Sequence[Tensor]) -> list[DirectionWeights]:
    whole = [*map(Tensor.contiguous, weights)]
    return [DirectionWeights(*whole[i : i + _FIELDS]) for i in range(0, len(weights), _FIELDS)]


def _conv_inputs(xz: Tensor, way: DirectionWeights, reverse: bool) -> ConvInputs:
    return ConvInputs(xz[..., : xz.shape[2] // 2], way.conv.squeeze(1), way.conv_bias, True, reverse)


def _scan_inputs(xz: Tensor, way: DirectionWeights, kept: _Kept, reverse: bool) -> ScanInputs:
    rank, n = way.dt_proj.shape[1], way.A_log.shape[1]
    B = kept.projected[..., rank : rank + n].unsqueeze(2)
    C = kept.projected[..., rank + n :].unsqueeze(2)
    z = xz[..., xz.shape[2] // 2 :]
    return ScanInputs(kept.u, kept.delta, kept.A, B, C, way.D, z, way.dt_bias, True, reverse)


def _outputs(xz: Tensor, *args: Any) -> list[Tensor]:
    """y, then the mean states of each direction, then what each keeps; uninitialised."""
    *_, states, save, weights = args
    batch, tokens, channels = *xz.shape[:2], xz.shape[2] // 2
    y = xz.new_empty(batch, tokens, channels)
    means: list[Tensor] = []
    kept: list[Tensor] = []
    for way in _ways(weights):
        n = way.A_log.shape[1]
        u, delta = torch.empty_like(y), torch.empty_like(y)
        projected = xz.new_empty(batch, tokens, way.x_proj.shape[0])
        formed = ScanInputs(u, delta, way.A_log, projected[..., None, :n], projected[..., None, :n])
        means += [xz.new_empty(shape if states else 0) for shape in ((batch, tokens, 1, n), (batch, tokens, 1))]
        saved = xz.new_empty(saved_shape(formed) if save else 0)
        kept += _Kept(projected, u, delta, xz.new_empty(way.A_log.shape), saved)
    return [y, *means, *kept]


def _kernel(
    xz: Tensor, reverse: Sequence[bool], scale: float, states: bool, save: bool, weights: Sequence[Tensor]
) -> list[Tensor]:
    xz, threads = rows(xz), torch.get_num_threads()
    y, *parts = outputs = _outputs(xz, states, save, weights)
    channels = y.shape[2]
    for i, way in enumerate(_ways(weights)):
        means, kept = _parts(parts, len(reverse), i)
        native.conv_forward(_conv_inputs(xz, way, reverse[i]), kept.u, threads)
        projected = kept.projected.view(-1, way.x_proj.shape[0])
        torch.mm(kept.u.view(-1, channels), way.x_proj.t(), out=projected)
        torch.mm(projected[:, : way.dt_proj.shape[1]], way.dt_proj.t(), out=kept.delta.view(-1, channels))
        torch.exp(way.A_log, out=kept.A).neg_()
        found = Outputs(y, None, *means, None, kept.saved)
        native.scan_forward(_scan_inputs(xz, way, kept, reverse[i]), found, kept.saved, threads, scale, i > 0)
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    xz, ctx.reverse, ctx.scale, states, _, weights = inputs
    kept = output[1 + len(ctx.reverse) * _MEANS :]
    # Of what is kept, `projected` comes first; it holds the B and C of the states.
    ctx.mark_non_differentiable(*([x for i, x in enumerate(kept) if i % _KEPT] if states else output[1:]))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(xz, *weights, *kept)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    xz, *saved = ctx.saved_tensors
    count = len(ctx.reverse)
    weights, kept = saved[: count * _FIELDS], saved[count * _FIELDS :]
    first = 1 + count * _MEANS
    of_outputs = [*grads[:first], *grads[first::_KEPT]]  # of y, the mean states and `projected`
    needs = ctx.needs_input_grad[5:]
    dxz, *found = _directions_backward(xz, ctx.reverse, ctx.scale, of_outputs, needs, kept, weights)
    wanted = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return dxz, None, None, None, None, *wanted


def _input_grads(xz: Tensor, *args: Any) -> list[Tensor]:
    """Gradients of xz and of every weight, uninitialised; empty for a projection's that is not needed."""
    *_, needs, _, weights = args
    optional = [DirectionWeights._fields.index(name) for name in ("x_proj", "dt_proj")]
    found = [torch.empty_like(xz, memory_format=torch.contiguous_format)]
    for i, (weight, need) in enumerate(zip(weights, needs, strict=True)):
        found.append(xz.new_empty(0) if not need and i % _FIELDS in optional else weight.new_empty(weight.shape))
    return found


def _backward_kernel(
    xz: Tensor,
    reverse: Sequence[bool],
    scale: float,
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    kept: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> list[Tensor]:
    dxz, *found = outputs = _input_grads(xz, needs, kept, weights)
    xz, threads, channels = rows(xz), torch.get_num_threads(), xz.shape[2] // 2
    grad_y = xz.new_zeros(*xz.shape[:2], channels) if grads[0] is None else rows(grads[0])
    for i, way in enumerate(_ways(weights)):
        formed, to = _Kept(*kept[_KEPT * i : _KEPT * (i + 1)]), _ways(found)[i]
        grad_a, grad_delta = grads[1 + _MEANS * i : 1 + _MEANS * (i + 1)]
        grad_projected = grads[1 + _MEANS * len(reverse) + i]
        rank, n = way.dt_proj.shape[1], way.A_log.shape[1]
        dprojected = torch.empty_like(formed.projected)
        du, ddelta = torch.empty_like(formed.u), torch.empty_like(formed.delta)
        gradients = ScanInputs(
            u=du,
            delta=ddelta,
            A=to.A_log,
            B=dprojected[..., rank : rank + n].unsqueeze(2),
            C=dprojected[..., rank + n :].unsqueeze(2),
            D=to.D,
            z=dxz[..., channels:],
            delta_bias=to.dt_bias,
        )
        of_outputs = OutputGrads(grad_y, None, flat(grad_a), flat(grad_delta), None)
        x = _scan_inputs(xz, way, formed, reverse[i])
        native.scan_backward(x, formed.saved, of_outputs, gradients, threads, scale, i > 0)
        to.A_log.mul_(formed.A)  # A = -exp(A_log) is its own derivative
        by_delta, u = ddelta.view(-1, channels), formed.u.view(-1, channels)
        columns, projected = dprojected.view(-1, rank + 2 * n), formed.projected.view(-1, rank + 2 * n)
        torch.mm(by_delta, way.dt_proj, out=columns[:, :rank])
        if grad_projected is not None:
            dprojected += grad_projected
        du.view(-1, channels).addmm_(columns, way.x_proj)
        inputs = _conv_inputs(xz, way, reverse[i])
        native.conv_backward(inputs, du, dxz[..., :channels], to.conv.squeeze(1), to.conv_bias, threads, i > 0)
        if to.x_proj.numel():
            torch.mm(columns.t(), u, out=to.x_proj)
        if to.dt_proj.numel():
            torch.mm(by_delta.t(), projected[:, :rank], out=to.dt_proj)
    return outputs


_directions_backward = define(
    "directions_backward(Tensor xz, bool[] reverse, float scale, Tensor?[] grads, bool[] needs, Tensor[] kept,"
    " Tensor[] weights) -> Tensor[]",
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
