"""Fused distances: the derivatives are computed with the value, so the gradient is one multiplication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, keep_slopes, matrix, native, new, times_slopes

KINDS = {"simplified": 0, "aligned": 1, "martin": 2, "fubini-study": 3, "binet-cauchy": 4}


def _distance_fake(*args: Any) -> tuple[Tensor, ...]:
    old_a, old_c, new_a, new_c, _, _, to_old, to_new = args
    slopes = (
        new(old_c, *like.shape) if wanted else new(old_c, 0)
        for like, wanted in ((old_a, to_old), (old_c, to_old), (new_a, to_new), (new_c, to_new))
    )
    return new(old_c, *old_c.shape[:-1]), *slopes


def _distance(*args: Any) -> tuple[Tensor, ...]:
    *inputs, kind, raw, to_old, to_new = args
    value, *slopes = outputs = _distance_fake(*args)
    states = (matrix(tensor) for tensor in inputs)
    wanted = zip(slopes, (to_old, to_old, to_new, to_new), strict=True)
    native.distance(
        *(*states, kind, raw, torch.get_num_threads(), value.view(-1)),
        *(matrix(slope) if want else None for slope, want in wanted),
    )
    return outputs


def _distance_autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    return (*times_slopes(ctx, grad, ctx.needs_input_grad[:4]), None, None, None, None)


distance = define(
    "distance(Tensor old_a, Tensor old_c, Tensor new_a, Tensor new_c, int kind, bool raw, bool to_old,"
    " bool to_new) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _distance,
    _distance_fake,
)
differentiate("distance", _distance_autograd, keep_slopes)


def _output_fake(*args: Any) -> tuple[Tensor, ...]:
    old_a, *_, to_new = args
    slope = old_a.shape if to_new else (0,)
    return new(old_a, *old_a.shape[:-1]), *(new(old_a, *slope) for _ in range(3))


def _output(*args: Any) -> tuple[Tensor, ...]:
    *inputs, raw, to_new = args
    value, *slopes = outputs = _output_fake(*args)
    states = (matrix(tensor) for tensor in inputs)
    wanted = (matrix(slope) if to_new else None for slope in slopes)
    native.output_distance(*states, raw, torch.get_num_threads(), value.view(-1), *wanted)
    return outputs


def _output_autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    return (None, None, None, *times_slopes(ctx, grad, ctx.needs_input_grad[3:6]), None, None)


output_distance = define(
    "output_distance(Tensor old_a, Tensor old_c, Tensor old_b, Tensor new_a, Tensor new_c, Tensor new_b, bool raw,"
    " bool to_new) -> (Tensor, Tensor, Tensor, Tensor)",
    _output,
    _output_fake,
)
differentiate("output_distance", _output_autograd, keep_slopes)
