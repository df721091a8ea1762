"""Fused distances: the derivatives are computed with the value, so the gradient is one multiplication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, matrix, native, new

KINDS = {"simplified": 0, "aligned": 1, "martin": 2}


def _distance_fake(*args: Any) -> tuple[Tensor, ...]:
    old_a, old_c, new_a, new_c, _, to_old, to_new = args
    slopes = (
        new(old_c, *like.shape) if wanted else new(old_c, 0)
        for like, wanted in ((old_a, to_old), (old_c, to_old), (new_a, to_new), (new_c, to_new))
    )
    return new(old_c, *old_c.shape[:-1]), *slopes


def _distance(*args: Any) -> tuple[Tensor, ...]:
    *inputs, kind, to_old, to_new = args
    value, *slopes = outputs = _distance_fake(*args)
    states = (matrix(tensor) for tensor in inputs)
    wanted = zip(slopes, (to_old, to_old, to_new, to_new), strict=True)
    native.distance(
        *(*states, kind, torch.get_num_threads(), value.view(-1)),
        *(matrix(slope) if want else None for slope, want in wanted),
    )
    return outputs


def _distance_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _distance_autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    slopes = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    result = (grad.unsqueeze(-1) * slope if grad is not None and need else None for slope, need in slopes)
    return (*result, None, None, None)


distance = define(
    "distance(Tensor old_a, Tensor old_c, Tensor new_a, Tensor new_c, int kind, bool to_old, bool to_new)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _distance,
    _distance_fake,
)
differentiate("distance", _distance_autograd, _distance_setup)


def _output_fake(*args: Any) -> tuple[Tensor, ...]:
    old_a, *_, to_new = args
    slope = old_a.shape if to_new else (0,)
    return new(old_a, *old_a.shape[:-1]), *(new(old_a, *slope) for _ in range(3))


def _output(*args: Any) -> tuple[Tensor, ...]:
    *inputs, to_new = args
    value, *slopes = outputs = _output_fake(*args)
    states = (matrix(tensor) for tensor in inputs)
    wanted = (matrix(slope) if to_new else None for slope in slopes)
    native.output_distance(*states, torch.get_num_threads(), value.view(-1), *wanted)
    return outputs


def _output_autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = zip(ctx.saved_tensors, ctx.needs_input_grad[3:6], strict=True)
    result = (grad.unsqueeze(-1) * slope if grad is not None and need else None for slope, need in needs)
    return (None, None, None, *result, None)


output_distance = define(
    "output_distance(Tensor old_a, Tensor old_c, Tensor old_b, Tensor new_a, Tensor new_c, Tensor new_b, bool to_new)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _output,
    _output_fake,
)
differentiate("output_distance", _output_autograd, _distance_setup)
