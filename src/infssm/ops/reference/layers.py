"""What stands around the scan: causal convolution, residual addition with RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.ops.checks import compute_dtype
from infssm.ops.records import ConvInputs


def causal_conv1d(inputs: ConvInputs) -> Tensor:
    """Depthwise convolution over the tokens."""
    x, weight, bias, silu, reverse, seq_idx = inputs
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for k, tap in enumerate(weight.unbind(1)):
        y = y + tap * _shifted(x, weight.shape[1] - 1 - k, reverse, seq_idx)
    return F.silu(y) if silu else y


def _shifted(x: Tensor, back: int, reverse: bool, seq_idx: Tensor | None) -> Tensor:
    """For each token the one ``back`` before (reverse: after) it; 0 where that is not in its sequence."""
    moved = _move(x.mT, back, reverse, 0.0).mT
    if seq_idx is None or back == 0:
        return moved
    return moved * (_move(seq_idx, back, reverse, -1.0) == seq_idx).unsqueeze(-1)


def _move(x: Tensor, back: int, reverse: bool, fill: float) -> Tensor:
    """Move [..., tokens] by ``back`` tokens, away from the first (reverse: from the last)."""
    tokens = x.shape[-1]
    return F.pad(x, (0, back), value=fill)[..., back:] if reverse else F.pad(x, (back, 0), value=fill)[..., :tokens]


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and that sum in at least float32."""
    total = x.to(compute_dtype(x, residual))
    if residual is not None:
        total = total + residual
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype), total
