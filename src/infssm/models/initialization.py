"""Initialisation rules of the Mamba family."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Standard deviation of a unit normal truncated to [-2, 2].
_TRUNCATED_STD = 0.87962566103423978


def dt_bias(channels: int, *, low: float = 0.001, high: float = 0.1, floor: float = 1e-4) -> Tensor:
    """Bias [channels] whose softplus is log-uniform in [low, high]."""
    dt = torch.exp(torch.rand(channels) * (math.log(high) - math.log(low)) + math.log(low)).clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))


def a_log(channels: int, n: int) -> nn.Parameter:
    """``A_log`` [channels, n] of the real S4D initialisation: A = -(1, ..., n) in every channel."""
    values = torch.arange(1, n + 1, dtype=torch.float32).log()
    return nn.Parameter(values.repeat(channels, 1))


@torch.no_grad()
def residual_projection_(weight: Tensor, residual_layers: int) -> None:
    """Initialise a projection back into the residual stream, scaled by 1 / sqrt(number of such layers)."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    weight /= math.sqrt(residual_layers)


def lecun_normal_(weight: Tensor) -> None:
    """LeCun normal for a convolution weight [out, in, ...], as Vim's patch embedding has it.

    The bounds of the truncation are absolute (+-2), hence hardly ever reached: the standard deviation stays that of
    the untruncated normal, 1.137 / sqrt(fan_in).
    """
    fan_in = weight[0].numel()
    nn.init.trunc_normal_(weight, std=math.sqrt(1 / fan_in) / _TRUNCATED_STD)


def linear_(linear: nn.Linear) -> None:
    """Classifier initialisation: truncated normal of standard deviation 0.02, zero bias."""
    nn.init.trunc_normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
