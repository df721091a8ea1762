"""Mamba-2's scan in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops.library import arguments, define, differentiate, flat, given, native, new, rows
from infssm.kernels.records import HeadInputs

_COUNT = len(HeadInputs._fields)
_WITH_GRADIENT = [name for name in HeadInputs._fields if name not in ("delta_softplus", "seq_idx")]


def _up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


def saved_shape(x: HeadInputs) -> tuple[int, ...]:
    """The state before each chunk but the first, in the order in which the kernel holds it."""
    (batch, tokens, channels), heads, n = x.u.shape, x.A.shape[0], x.B.shape[3]
    state = _up(channels // heads, native.lanes()) * _up(n, native.heads_rows())
    return batch, (tokens - 1) // native.heads_span(), heads * state


def _outputs(*args: Any) -> tuple[Tensor, ...]:
    x, save = HeadInputs(*args[:_COUNT]), args[_COUNT]
    kept = (x.u.shape, saved_shape(x)) if save else ((0,), (0,))
    return new(x.u, *x.u.shape), *(new(x.u, *shape) for shape in kept)


def _readable(args: tuple[Any, ...]) -> HeadInputs:
    """As the kernel reads them: any strides, but the last dimension contiguous."""
    x = HeadInputs(*args[:_COUNT])
    by_token = {name: rows(getattr(x, name)) for name in ("u", "delta", "B", "C", "z")}
    return x._replace(**by_token, A=flat(x.A), D=flat(x.D), delta_bias=flat(x.delta_bias))


def _heads(*args: Any) -> tuple[Tensor, ...]:
    y, plain, saved = outputs = _outputs(*args)
    native.heads_forward(_readable(args), y, given(plain), given(saved), torch.get_num_threads())
    return outputs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    tensors = (None if isinstance(value, bool) else value for value in inputs[:_COUNT])
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.softplus = HeadInputs(*inputs[:_COUNT]).delta_softplus


def _autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, plain, saved = ctx.saved_tensors
    x = HeadInputs(*inputs)._replace(delta_softplus=ctx.softplus)
    if grads[0] is None:
        return (None,) * (_COUNT + 1)
    found = dict(zip(_WITH_GRADIENT, heads_backward(*x, plain, saved, grads[0]), strict=True))
    asked = zip(HeadInputs._fields, ctx.needs_input_grad, strict=False)
    return *(found[name] if need and name in found else None for name, need in asked), None


def _input_grads(*args: Any) -> tuple[Tensor, ...]:
    """Room for the gradients of the inputs; empty for an input that was not given."""
    x = HeadInputs(*args[:_COUNT])
    inputs = (getattr(x, name) for name in _WITH_GRADIENT)
    return tuple(new(x.u, 0) if like is None else new(x.u, *like.shape) for like in inputs)


def _heads_backward(*args: Any) -> tuple[Tensor, ...]:
    plain, saved, grad = args[_COUNT:]
    found = _input_grads(*args)
    record = HeadInputs(**dict(zip(_WITH_GRADIENT, map(given, found), strict=True)))
    threads = torch.get_num_threads()
    native.heads_backward(_readable(args), flat(plain), given(flat(saved)), rows(grad), record, threads)
    return found


_INPUTS = arguments(HeadInputs)
heads = define(
    f"heads({_INPUTS}, bool save) -> (Tensor y, Tensor plain, Tensor saved)",
    _heads,
    _outputs,
)
heads_backward = define(
    f"heads_backward({_INPUTS}, Tensor plain, Tensor saved, Tensor grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _heads_backward,
    _input_grads,
)
differentiate("heads", _autograd, _setup)
