"""What stands around the scan: causal convolution, residual addition with RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.kernels._checks import compute_dtype


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, reverse: bool) -> Tensor:
    """Depthwise convolution over the tokens; x: [batch, tokens, channels]; weight: [channels, width]."""
    tokens, width = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, 0, width - 1) if reverse else (0, 0, width - 1, 0))
    taps = weight.flip(1) if reverse else weight
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for k in range(width):
        y = y + taps[:, k] * padded[:, k : k + tokens]
    return F.silu(y) if silu else y


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and that sum in at least float32."""
    total = x.to(compute_dtype(x, residual))
    if residual is not None:
        total = total + residual
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype), total
