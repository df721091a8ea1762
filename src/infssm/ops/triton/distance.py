"""The fused distances in Triton: the derivatives are computed with the value, so the gradient is one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.distances.lattice import squared_arc
from infssm.ops.triton._launch import power_of_two, run

# Tokens of a program, one per lane of a warp.
_ROWS = 32
_STATES = ("old_a", "old_c", "new_a", "new_c", "old_b", "new_b")


def _launch(kernel: Any, value: Tensor, n: int, named: dict[str, Any], **more: Any) -> None:
    states = power_of_two(n)
    sizes = {"rows": value.numel(), "n": n, "ROWS": _ROWS, "STATES": states}
    warps = min(16, max(1, states // 8))
    run(kernel, -(-value.numel() // _ROWS), value, named, {"value": value}, sizes, more, warps=warps)


def forward(kind: str, soft: bool, states: Sequence[Any], value: Tensor, slopes: Sequence[Any]) -> None:
    """Fill value and slopes, where given, from the states as rows; both in the order of the operator."""
    from infssm.ops.triton.kernels import distance as kernels

    named = dict(zip(_STATES, states, strict=True)) | {f"d_{k}": v for k, v in zip(_STATES, slopes, strict=True)}
    named |= {"poles": named["old_a"].shape[-1], "SOFT": soft}
    if kind == "output":
        _output(named, value)
    elif kind in ("simplified", "aligned"):
        _launch(kernels.gram, value, named["old_c"].shape[-1], named, ALIGNED=kind == "aligned")
    elif kind in ("martin", "fubini-study", "binet-cauchy"):
        _launch(kernels.martin, value, named["poles"], named)
        _from_martin(kind, value, (named["d_old_a"], named["d_new_a"]))
    else:
        raise ConfigError(f"kind={kind!r} has no Triton kernel; use backend=None or 'reference'")


def _from_martin(kind: str, value: Tensor, slopes: Sequence[Any]) -> None:
    """Replace Martin's distance and its derivatives by those of a function of it, in place."""
    if kind == "martin":
        return
    square = -torch.expm1(-value)
    if kind == "fubini-study":
        arc = squared_arc(value)
        factor = torch.where(value == 0, 1, (arc / square).sqrt() * torch.exp(-value / 2))
    else:
        arc, factor = square, 1 - square
    value.copy_(arc)
    for slope in slopes:
        if slope is not None:
            slope.mul_(factor.unsqueeze(-1))


def _output(named: dict[str, Any], value: Tensor) -> None:
    """The kernel has the derivatives of its second side; those of the first are the same with the sides exchanged."""
    from infssm.ops.triton.kernels.distance import output

    n = named["old_c"].shape[-1]
    named |= {name: named[name].expand(-1, n).contiguous() for name in ("old_a", "new_a")}
    for first, second in (("new", "old"), ("old", "new")):
        to_pole, dc, db = (named[f"d_{second}_{x}"] for x in "acb")
        if second == "old" and to_pole is None:
            continue
        sides = {f"old_{x}": named[f"{first}_{x}"] for x in "acb"} | {f"new_{x}": named[f"{second}_{x}"] for x in "acb"}
        by_pole = None if to_pole is None else torch.empty_like(sides["new_a"])
        _launch(output, value, n, named, **sides, da=by_pole, dc=dc, db=db)
        if by_pole is not None:
            by_pole = by_pole if to_pole.shape[-1] == n else by_pole.sum(-1)
            to_pole.copy_(by_pole.view(to_pole.shape))
