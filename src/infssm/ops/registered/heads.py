"""Mamba-2's scan in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.checks import expect_rank
from infssm.ops.records import HeadInputs
from infssm.ops.registered.library import arguments, define, differentiate, flat, given, native, new, rows
from infssm.ops.triton import heads as _triton

_COUNT = len(HeadInputs._fields)
_WITH_GRADIENT = [name for name in HeadInputs._fields if name not in ("delta_softplus", "seq_idx")]


def _up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


def saved_shape(x: HeadInputs) -> tuple[int, ...]:
    """The state before each chunk but the first, in the order in which the kernel holds it."""
    (batch, tokens, channels), heads, n = x.u.shape, x.A.shape[0], x.B.shape[3]
    state = _up(channels // heads, native.lanes()) * _up(n, native.ssd_rows())
    return batch, (tokens - 1) // native.ssd_span(), heads * state


def _outputs(*args: Any) -> tuple[Tensor, ...]:
    x, (save, triton) = HeadInputs(*args[:_COUNT]), args[_COUNT:]
    expect_rank("u", x.u, "batch, tokens, channels")
    expect_rank("A", x.A, "heads")
    expect_rank("B", x.B, "batch, tokens, groups, n")
    # The backward needs y for the gradient of the gate alone.
    plain = x.u.shape if save and x.z is not None else (0,)
    saved = (_triton.saved_shape(x) if triton else saved_shape(x)) if save else (0,)
    return new(x.u, *x.u.shape), new(x.u, *plain), new(x.u, *saved)


def _readable(args: tuple[Any, ...]) -> HeadInputs:
    """As the kernel reads them: any strides, but the last dimension contiguous."""
    x = HeadInputs(*args[:_COUNT])
    by_token = {name: rows(getattr(x, name)) for name in ("u", "delta", "B", "C", "z")}
    return x._replace(**by_token, A=flat(x.A), D=flat(x.D), delta_bias=flat(x.delta_bias))


def _heads(*args: Any) -> tuple[Tensor, ...]:
    y, plain, saved = outputs = _outputs(*args)
    native.ssd_forward(_readable(args), y, given(plain), given(saved), torch.get_num_threads(), None, None)
    return outputs


def _triton_heads(*args: Any) -> tuple[Tensor, ...]:
    y, plain, saved = outputs = _outputs(*args)
    _triton.forward(_readable(args), y, given(plain), given(saved))
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    tensors = (None if isinstance(value, bool) else value for value in inputs[:_COUNT])
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.options = HeadInputs(*inputs[:_COUNT]).delta_softplus, inputs[-1]


def _autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, plain, saved = ctx.saved_tensors
    softplus, triton = ctx.options
    x = HeadInputs(*inputs)._replace(delta_softplus=softplus)
    if grads[0] is None:
        return (None,) * (_COUNT + 2)
    found = dict(zip(_WITH_GRADIENT, heads_backward(*x, plain, saved, grads[0], triton), strict=True))
    asked = zip(HeadInputs._fields, ctx.needs_input_grad, strict=False)
    return *(found[name] if need and name in found else None for name, need in asked), None, None


def _input_grads(*args: Any) -> tuple[Tensor, ...]:
    """Room for the gradients of the inputs; empty for an input that was not given."""
    x = HeadInputs(*args[:_COUNT])
    inputs = (getattr(x, name) for name in _WITH_GRADIENT)
    return tuple(new(x.u, 0) if like is None else new(x.u, *like.shape) for like in inputs)


def _backward_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs, what the forward kept, and the gradient, as the kernels read them; the gradients; those by input."""
    plain, saved, grad, _ = args[_COUNT:]
    found = _input_grads(*args)
    record = HeadInputs(**dict(zip(_WITH_GRADIENT, map(given, found), strict=True)))
    return _readable(args), given(flat(plain)), given(flat(saved)), rows(grad), record, found


def _heads_backward(*args: Any) -> tuple[Tensor, ...]:
    *call, found = _backward_of(args)
    native.ssd_backward(*call, torch.get_num_threads(), *(None,) * 4)
    return tuple(found)


def _triton_backward(*args: Any) -> tuple[Tensor, ...]:
    *call, found = _backward_of(args)
    _triton.backward(*call)
    return tuple(found)


_INPUTS = arguments(HeadInputs)
heads = define(
    f"heads({_INPUTS}, bool save, bool triton) -> (Tensor y, Tensor plain, Tensor saved)",
    _heads,
    _outputs,
    triton=_triton_heads,
)
heads_backward = define(
    f"heads_backward({_INPUTS}, Tensor plain, Tensor saved, Tensor grad, bool triton)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _heads_backward,
    _input_grads,
    triton=_triton_backward,
)
differentiate("heads", _autograd, _setup)
