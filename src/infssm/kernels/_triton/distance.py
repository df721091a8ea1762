"""Fused distances: the derivatives are computed with the value, so the gradient is one multiplication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, given, keep_slopes, matrix
from infssm.kernels._ops.distance import (
    KINDS,
    _distance_autograd,
    _distance_fake,
    _output_autograd,
    _output_fake,
)
from infssm.kernels._triton._launch import DEVICES, power_of_two, run
from infssm.kernels.arc import squared_arc

# Tokens of a program, one per lane of a warp.
_ROWS = 32


def _launch(kernel: Any, value: Tensor, n: int, *args: Any, **constants: bool) -> None:
    states = power_of_two(n)
    sizes = {"ROWS": _ROWS, "STATES": states, "warps": min(16, max(1, states // 8))}
    run(kernel, -(-value.numel() // _ROWS), value, *args, **constants, **sizes)


def _distance(*args: Any) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.distance import gram, martin

    *inputs, kind, raw, _, _ = args
    value, *slopes = outputs = _distance_fake(*args)
    states = [matrix(tensor) for tensor in inputs]
    rows, poles, n = value.numel(), inputs[0].shape[-1], inputs[1].shape[-1]
    d_old_a, d_old_c, d_new_a, d_new_c = wanted = [given(slope) for slope in slopes]
    if kind not in (KINDS["simplified"], KINDS["aligned"]):
        _launch(martin, value, poles, states[0], states[2], value, d_old_a, d_new_a, rows, poles, RAW=raw)
        for slope in (d_old_c, d_new_c):
            if slope is not None:
                slope.zero_()
        if kind != KINDS["martin"]:
            _follow(kind, value, (d_old_a, d_new_a))
    else:
        _launch(gram, value, n, *states, value, *wanted, rows, poles, n, ALIGNED=kind == KINDS["aligned"], RAW=raw)
    return outputs


def _follow(kind: int, martin: Tensor, slopes: tuple[Tensor | None, ...]) -> None:
    """Turn Martin's distance and its derivatives, in place, into those of a distance that is a function of it."""
    square = -torch.expm1(-martin)
    if kind == KINDS["fubini-study"]:
        value = squared_arc(martin)
        factor = torch.where(martin == 0, 1, (value / square).sqrt() * torch.exp(-martin / 2))
    else:
        value, factor = square, 1 - square
    martin.copy_(value)
    for slope in slopes:
        if slope is not None:
            slope.mul_(factor.unsqueeze(-1))


def _output(*args: Any) -> tuple[Tensor, ...]:
    from infssm.kernels._triton.kernels.distance import output

    *inputs, raw, _ = args
    value, *slopes = outputs = _output_fake(*args)
    n = inputs[0].shape[-1]
    states = (matrix(tensor) for tensor in inputs)
    _launch(output, value, n, *states, value, *(given(slope) for slope in slopes), value.numel(), n, RAW=raw)
    return outputs


distance = define(
    "triton_distance(Tensor old_a, Tensor old_c, Tensor new_a, Tensor new_c, int kind, bool raw, bool to_old,"
    " bool to_new) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _distance,
    _distance_fake,
    DEVICES,
)
differentiate("triton_distance", _distance_autograd, keep_slopes)
output_distance = define(
    "triton_output_distance(Tensor old_a, Tensor old_c, Tensor old_b, Tensor new_a, Tensor new_c, Tensor new_b,"
    " bool raw, bool to_new) -> (Tensor, Tensor, Tensor, Tensor)",
    _output,
    _output_fake,
    DEVICES,
)
differentiate("triton_output_distance", _output_autograd, keep_slopes)
