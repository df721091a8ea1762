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

from infssm.ops.backend import choose
from infssm.ops.records import ConvInputs, ScanInputs
from infssm.ops.registered.library import given, native, new, rows
from infssm.ops.registered.scan import OutputGrads, Outputs, saved_shape


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


def can_scan_directions(xz: Tensor, weights: Sequence[DirectionWeights]) -> bool:
    """Whether `scan_directions` serves: compiled kernels, plain float32 CPU tensors, and nothing tracing the model."""
    return is_plain([xz, *(tensor for way in weights for tensor in way)])


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether the compiled kernels may be called directly: float32 CPU tensors, and nothing traces or wraps them."""
    if native is None or torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active():
        return False
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return False
    plain = all(type(tensor) in _PLAIN for tensor in tensors)
    return plain and all(t.dtype == torch.float32 for t in tensors) and choose(None, *tensors) == "cpu"


_PLAIN = (Tensor, torch.nn.Parameter)


def scan_directions(
    xz: Tensor, weights: Sequence[DirectionWeights], reverse: Sequence[bool], *, scale: float, states: bool
) -> tuple[Tensor, list[DirectionStates]]:
    """Sum over the directions of `scale * scan(conv(x))`, gated by z; xz: [batch, tokens, 2 channels] holds x, then z.

    Returns y: [batch, tokens, channels], and the states of each direction if they were asked for.
    """
    options = _Options(tuple(reverse), scale, states, torch.is_grad_enabled())
    y, *parts = _Directions.apply(options, xz, *(tensor for way in weights for tensor in way))  # type: ignore[no-untyped-call]
    if not states:
        return y, []
    found = []
    for a, delta, projected, way in zip(parts[::3], parts[1::3], parts[2::3], weights, strict=True):
        n = way.A_log.shape[1]
        low, b, c = projected.split([way.dt_proj.shape[1], n, n], dim=-1)
        found.append(DirectionStates(a.squeeze(2), delta.squeeze(2), low, b, c))
    return y, found


class _Options(NamedTuple):
    reverse: tuple[bool, ...]
    scale: float
    states: bool
    save: bool


_FIELDS = len(DirectionWeights._fields)


class _Directions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _Options, xz: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        xz = rows(xz)
        ways = [DirectionWeights(*flat[i : i + _FIELDS]) for i in range(0, len(flat), _FIELDS)]
        y = new(xz, *xz.shape[:2], xz.shape[2] // 2)
        outputs, kept = [y], []
        for i, (way, reverse) in enumerate(zip(ways, options.reverse, strict=True)):
            found, formed = _forward(xz, way, reverse, y, options, add=i > 0)
            kept += [*formed, found.saved]
            if options.states:
                outputs += [found.a, found.delta, formed.projected]
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(xz, *flat, *kept)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        options: _Options = ctx.options
        xz, *saved = ctx.saved_tensors
        count = len(options.reverse)
        kept = saved[count * _FIELDS :]
        grad_y = torch.zeros_like(xz[..., : xz.shape[2] // 2]) if grad_y is None else rows(grad_y)
        dxz, found = torch.empty_like(xz), []
        for i in range(count):
            way = DirectionWeights(*saved[i * _FIELDS : (i + 1) * _FIELDS])
            formed, states = _Formed(*kept[5 * i : 5 * i + 4]), kept[5 * i + 4]
            of_states = grads[3 * i : 3 * i + 3] if options.states else (None, None, None)
            needs = ctx.needs_input_grad[2 + i * _FIELDS : 2 + (i + 1) * _FIELDS]
            found += _backward(xz, way, formed, states, grad_y, of_states, dxz, options, i, needs)
        return None, dxz, *found


class _Formed(NamedTuple):
    """What the forward of one direction forms on its way; all but `A` [batch, tokens, ...]."""

    u: Tensor
    projected: Tensor
    delta: Tensor
    A: Tensor


def _conv_inputs(xz: Tensor, way: DirectionWeights, reverse: bool) -> ConvInputs:
    return ConvInputs(xz[..., : xz.shape[2] // 2], way.conv.squeeze(1), way.conv_bias, True, reverse)


def _scan_inputs(xz: Tensor, way: DirectionWeights, formed: _Formed, reverse: bool) -> ScanInputs:
    rank, n = way.dt_proj.shape[1], way.A_log.shape[1]
    B = formed.projected[..., rank : rank + n].unsqueeze(2)
    C = formed.projected[..., rank + n :].unsqueeze(2)
    z = xz[..., xz.shape[2] // 2 :]
    return ScanInputs(formed.u, formed.delta, formed.A, B, C, way.D, z, way.dt_bias, True, reverse)


def _forward(
    xz: Tensor, way: DirectionWeights, reverse: bool, y: Tensor, options: _Options, *, add: bool
) -> tuple[Outputs, _Formed]:
    threads = torch.get_num_threads()
    u, (batch, tokens, _), n = torch.empty_like(y), y.shape, way.A_log.shape[1]
    native.conv_forward(_conv_inputs(xz, way, reverse), u, threads)
    projected = torch.mm(u.view(batch * tokens, -1), way.x_proj.t())
    delta = torch.mm(projected[:, : way.dt_proj.shape[1]], way.dt_proj.t()).view_as(y)
    formed = _Formed(u, projected.view(batch, tokens, -1), delta, way.A_log.exp().neg_())
    x = _scan_inputs(xz, way, formed, reverse)
    found = Outputs(
        y=y,
        last=None,
        a=new(y, batch, tokens, 1, n) if options.states else None,
        delta=new(y, batch, tokens, 1) if options.states else None,
        zoh=None,
        saved=new(y, *saved_shape(x)) if options.save else None,
    )
    native.scan_forward(x, found, found.saved, threads, options.scale, add)
    return found, formed


def _backward(
    xz: Tensor,
    way: DirectionWeights,
    formed: _Formed,
    saved: Tensor,
    grad_y: Tensor,
    of_states: Sequence[Tensor | None],
    dxz: Tensor,
    options: _Options,
    index: int,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the direction's weights; those of x and z go into dxz."""
    grad_a, grad_delta, grad_projected = of_states
    reverse, threads, channels = options.reverse[index], torch.get_num_threads(), grad_y.shape[2]
    rank, n = way.dt_proj.shape[1], way.A_log.shape[1]
    x = _scan_inputs(xz, way, formed, reverse)
    dprojected = torch.empty_like(formed.projected)
    found = ScanInputs(
        u=torch.empty_like(formed.u),
        delta=torch.empty_like(formed.delta),
        A=torch.empty_like(formed.A),
        B=dprojected[..., rank : rank + n].unsqueeze(2),
        C=dprojected[..., rank + n :].unsqueeze(2),
        D=torch.empty_like(way.D),
        z=dxz[..., channels:],
        delta_bias=torch.empty_like(way.dt_bias),
        initial_state=None,
    )
    of_outputs = OutputGrads(grad_y, None, _whole(grad_a), _whole(grad_delta), None)
    native.scan_backward(x, saved, of_outputs, found, threads, options.scale, index > 0)
    ddelta, u = found.delta.view(-1, channels), formed.u.view(-1, channels)
    columns, projected = dprojected.view(-1, rank + 2 * n), formed.projected.view(-1, rank + 2 * n)
    torch.mm(ddelta, way.dt_proj, out=columns[:, :rank])
    if grad_projected is not None:
        dprojected += grad_projected
    found.u.view(-1, channels).addmm_(columns, way.x_proj)
    dconv, dconv_bias = torch.empty_like(way.conv), torch.empty_like(way.conv_bias)
    inputs = _conv_inputs(xz, way, reverse)
    native.conv_backward(inputs, found.u, dxz[..., :channels], dconv.squeeze(1), dconv_bias, threads, index > 0)
    wanted = DirectionWeights._fields
    gradients = {
        "conv": dconv,
        "conv_bias": dconv_bias,
        "x_proj": torch.mm(columns.t(), u) if needs[wanted.index("x_proj")] else None,
        "dt_proj": torch.mm(ddelta.t(), projected[:, :rank]) if needs[wanted.index("dt_proj")] else None,
        "dt_bias": found.delta_bias,
        "A_log": found.A.mul_(formed.A),
        "D": found.D,
    }
    return [gradients[name] if need else None for name, need in zip(wanted, needs, strict=True)]


def _whole(grad: Tensor | None) -> Tensor | None:
    return None if given(grad) is None or grad is None else grad.contiguous()
