"""The selective scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infssm.ops.checks import expect_rank
from infssm.ops.records import ScanInputs
from infssm.ops.registered.library import arguments, define, differentiate, flat, given, native, new, rows
from infssm.ops.triton import scan as _triton


class Outputs(NamedTuple):
    """What the operator returns: y, the last state, the mean states, and what the backward starts its chunks from."""

    y: Any
    last: Any
    a: Any
    delta: Any
    zoh: Any
    saved: Any

    def wanted(self) -> Outputs:
        """None in the place of what was not asked for."""
        return Outputs(*map(given, self))


class OutputGrads(NamedTuple):
    """Gradients of the outputs; None where there is none."""

    y: Any
    last: Any
    a: Any
    delta: Any
    zoh: Any


_COUNT = len(ScanInputs._fields)
_WITH_GRADIENT = [name for name in ScanInputs._fields if name not in ("delta_softplus", "reverse", "seq_idx")]


def _found(grads: Sequence[Tensor]) -> ScanInputs:
    """Gradients as a record of the inputs; None in the place of what has no input."""
    return ScanInputs(**dict(zip(_WITH_GRADIENT, map(given, grads), strict=True)))


def _split(args: tuple[Any, ...]) -> tuple[ScanInputs, tuple[Any, ...]]:
    return ScanInputs(*args[:_COUNT]), args[_COUNT:]


def saved_shape(x: ScanInputs, triton: bool = False) -> tuple[int, ...]:
    """States before each chunk, in the order in which the kernels that asked for them hold channels."""
    (batch, tokens, channels), (groups, n) = x.u.shape, x.B.shape[2:]
    if triton:
        return batch, -(-tokens // _triton.CHUNK), n * channels
    lanes, chunk = native.lanes(), native.CHUNK
    padded = groups * ((channels // groups + lanes - 1) // lanes) * lanes
    return batch, (tokens + chunk - 1) // chunk, padded * n


def _outputs(*args: Any) -> Outputs:
    return _outputs_of(*_split(args))


def _outputs_of(x: ScanInputs, options: tuple[Any, ...]) -> Outputs:
    last, states, save, triton = options
    expect_rank("u", x.u, "batch, tokens, channels")
    expect_rank("B", x.B, "batch, tokens, groups, n")
    u, (batch, tokens, channels), (groups, n) = x.u, x.u.shape, x.B.shape[2:]
    return Outputs(
        y=new(u, batch, tokens, channels),
        last=new(u, batch, channels, n) if last else new(u, 0),
        a=new(u, batch, tokens, groups, n) if states else new(u, 0),
        delta=new(u, batch, tokens, groups) if states else new(u, 0),
        zoh=new(u, batch, tokens, groups, n) if states == 2 else new(u, 0),
        saved=new(u, *saved_shape(x, triton)) if save else new(u, 0),
    )


def _readable(x: ScanInputs) -> ScanInputs:
    """As the kernels read them: any strides, but the last dimension contiguous; A as it is."""
    by_token = {name: rows(getattr(x, name)) for name in ("u", "delta", "B", "C", "z")}
    whole = {name: flat(getattr(x, name)) for name in ("D", "delta_bias", "initial_state")}
    return x._replace(**by_token, **whole)


def _scan(*args: Any) -> Outputs:
    x, options = _split(args)
    outputs = _outputs_of(x, options)
    wanted = outputs.wanted()
    native.scan_forward(_readable(x), wanted, wanted.saved, torch.get_num_threads(), 1.0, False)
    return outputs


def _triton_scan(*args: Any) -> Outputs:
    x, options = _split(args)
    outputs = _outputs_of(x, options)
    _triton.forward(_readable(x), outputs.wanted())
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, (*_, triton) = _split(inputs)
    saved = output[-1]
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(None if isinstance(value, bool) else value for value in x), saved)
    ctx.options = x.delta_softplus, x.reverse, triton


def _autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, saved = ctx.saved_tensors
    softplus, reverse, triton = ctx.options
    x = ScanInputs(*inputs)._replace(delta_softplus=softplus, reverse=reverse)
    found = dict(zip(_WITH_GRADIENT, scan_backward(*x, saved, *grads[:5], triton), strict=True))
    asked = zip(ScanInputs._fields, ctx.needs_input_grad, strict=False)
    return *(found[name] if need and name in found else None for name, need in asked), None, None, None, None


def _input_grads(*args: Any) -> tuple[Tensor, ...]:
    """Room for the gradients of the inputs; empty for an input that was not given."""
    x, _ = _split(args)
    inputs = (getattr(x, name) for name in _WITH_GRADIENT)
    return tuple(new(x.u, 0) if like is None else new(x.u, *like.shape) for like in inputs)


def _backward_of(args: tuple[Any, ...]) -> tuple[ScanInputs, Tensor, OutputGrads]:
    x, (saved, grad_y, *states, _) = _split(args)
    last, a, delta, zoh = (flat(given(grad)) for grad in states)
    if zoh is not None and a is None:
        a = torch.zeros_like(zoh)
    y = new(x.u, *x.u.shape).zero_() if grad_y is None else rows(grad_y)
    return _readable(x), saved.contiguous(), OutputGrads(y, last, a, delta, zoh)


def _scan_backward(*args: Any) -> tuple[Tensor, ...]:
    found = _input_grads(*args)
    native.scan_backward(*_backward_of(args), _found(found), torch.get_num_threads(), 1.0, False)
    return found


def _triton_backward(*args: Any) -> tuple[Tensor, ...]:
    found = _input_grads(*args)
    _triton.backward(*_backward_of(args), _found(found))
    return found


_INPUTS = arguments(ScanInputs)
scan = define(
    f"scan({_INPUTS}, bool last, int states, bool save, bool triton)"
    " -> (Tensor y, Tensor last, Tensor a, Tensor delta, Tensor zoh, Tensor saved)",
    _scan,
    _outputs,
    triton=_triton_scan,
)
scan_backward = define(
    f"scan_backward({_INPUTS}, Tensor saved, Tensor? grad_y, Tensor? grad_last, Tensor? grad_a, Tensor? grad_delta,"
    " Tensor? grad_zoh, bool triton) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _scan_backward,
    _input_grads,
    triton=_triton_backward,
)
differentiate("scan", _autograd, _setup)
