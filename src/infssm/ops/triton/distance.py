"""The fused distances in Triton: the derivatives are computed with the value, so the gradient is one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.distances.lattice import squared_arc
from infssm.ops.triton._launch import power_of_two, run

# Tokens of a program, one per lane of a warp.
_ROWS = 32


def _launch(kernel: Any, value: Tensor, n: int, *args: Any, **constants: bool) -> None:
    states = power_of_two(n)
    sizes = {"ROWS": _ROWS, "STATES": states, "warps": min(16, max(1, states // 8))}
    run(kernel, -(-value.numel() // _ROWS), value, *args, **constants, **sizes)


def forward(kind: str, soft: bool, states: list[Any], value: Tensor, slopes: list[Any]) -> None:
    """Fill value and slopes, where given, from the states as rows; both in the order of the operator."""
    if kind == "output":
        _output(states, value, slopes, soft)
    elif kind in ("simplified", "aligned"):
        _gram(states, value, slopes, soft, kind == "aligned")
    else:
        _martin(states, value, slopes, soft, kind)


def _gram(states: list[Any], value: Tensor, slopes: list[Any], soft: bool, aligned: bool) -> None:
    from infssm.ops.triton.kernels.distance import gram

    poles, n = states[0].shape[-1], states[1].shape[-1]
    _launch(gram, value, n, *states[:4], value, *slopes[:4], value.numel(), poles, n, ALIGNED=aligned, SOFT=soft)


def _martin(states: list[Any], value: Tensor, slopes: list[Any], soft: bool, kind: str) -> None:
    from infssm.ops.triton.kernels.distance import martin

    poles, by_poles = states[0].shape[-1], (slopes[0], slopes[2])
    _launch(martin, value, poles, states[0], states[2], value, *by_poles, value.numel(), poles, SOFT=soft)
    if kind == "martin":
        return
    # A function of Martin's distance: its value and derivatives, in place.
    square = -torch.expm1(-value)
    if kind == "fubini-study":
        arc = squared_arc(value)
        factor = torch.where(value == 0, 1, (arc / square).sqrt() * torch.exp(-value / 2))
    else:
        arc, factor = square, 1 - square
    value.copy_(arc)
    for slope in by_poles:
        if slope is not None:
            slope.mul_(factor.unsqueeze(-1))


def _output(states: list[Any], value: Tensor, slopes: list[Any], soft: bool) -> None:
    """The kernel has the derivatives of its second side; those of the first are the same with the sides exchanged."""
    from infssm.ops.triton.kernels.distance import output

    n = states[1].shape[-1]
    old_a, old_c, new_a, new_c, old_b, new_b = states
    old, new = (old_a.expand(-1, n).contiguous(), old_c, old_b), (new_a.expand(-1, n).contiguous(), new_c, new_b)
    to_old, to_new = (slopes[0], slopes[1], slopes[4]), (slopes[2], slopes[3], slopes[5])
    for first, second, to in ((new, old, to_old), (old, new, to_new)):
        if to is to_old and to[0] is None:
            continue
        by_pole = None if to[0] is None else torch.empty_like(second[0])
        _launch(output, value, n, *first, *second, value, by_pole, *to[1:], value.numel(), n, SOFT=soft)
        if by_pole is not None:
            by_pole = by_pole if to[0].shape[-1] == n else by_pole.sum(-1)
            to[0].copy_(by_pole.view(to[0].shape))
