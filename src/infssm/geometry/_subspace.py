"""Distances between observability subspaces: functions of the poles alone."""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.geometry._registry import register_distance
from infssm.geometry._space import StateSpace


@register_distance("martin")
def martin(old: StateSpace, new: StateSpace) -> Tensor:
    """``-log prod cos^2 theta_i = sum_ij log1p(conj(d_i) d_j / ((1 - conj(a_i) a_j) (1 - conj(b_i) b_j)))``, d = a - b."""
    a, b = old.a, new.a
    shift = a - b
    scale = (1 - a.conj().unsqueeze(-1) * a.unsqueeze(-2)) * (1 - b.conj().unsqueeze(-1) * b.unsqueeze(-2))
    x = shift.conj().unsqueeze(-1) * shift.unsqueeze(-2) / scale
    if x.is_complex():
        x = 2 * x.real + x.real.square() + x.imag.square()
        return (torch.log1p(x).sum((-2, -1)) / 2).clamp_min(0)
    return torch.log1p(x).sum((-2, -1)).clamp_min(0)
