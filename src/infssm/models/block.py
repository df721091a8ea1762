"""The pre-norm residual block of the Mamba family, and how its layers are initialised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from infssm.models.mixer import LayerState, SSMMixer
from infssm.ops import add_rms_norm

# Standard deviation of a unit normal truncated to [-2, 2].
_TRUNCATED_STD = 0.87962566103423978


class RMSNorm(nn.Module):
    """Root-mean-square norm, applied together with the residual addition."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), both [batch, tokens, dim]; the residual is float32."""
        return add_rms_norm(x, residual, self.weight, eps=self.eps)


class Block(nn.Module):
    """Add, norm, mix: the mixer's output and the residual stay apart so that add and norm are one pass."""

    def __init__(self, dim: int, mixer: SSMMixer, *, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = RMSNorm(dim)
        self.drop_path_rate = drop_path_rate

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        mask: Tensor | None = None,
        state: LayerState | None = None,
    ) -> tuple[Any, Tensor]:
        """hidden: [batch, tokens, dim]; residual likewise, or None before the first block; mask: [batch, tokens].

        With a ``state`` of the mixer the first output is a pair: the mixer's output and the state after it.
        """
        if residual is not None:
            hidden = drop_path(hidden, self.drop_path_rate, self.training)
        hidden, residual = self.norm(hidden, residual)
        if state is not None:
            return self.mixer(hidden, state=state), residual
        return self.mixer(hidden) if mask is None else self.mixer(hidden, mask=mask), residual


def run_blocks(
    layers: nn.ModuleList,
    norm_f: RMSNorm,
    tokens: Tensor,
    *,
    drop_path_rate: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Run all blocks and the final norm on tokens [batch, tokens, dim]; mask: [batch, tokens], False where padded."""
    hidden, residual = tokens, None
    for layer in layers:
        hidden, residual = layer(hidden, residual, mask)
    features: Tensor = norm_f(drop_path(hidden, drop_path_rate, norm_f.training), residual)[0]
    return features


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Zero whole samples of x [batch, ...] with probability ``rate`` and rescale the rest (stochastic depth)."""
    if rate == 0.0 or not training:
        return x
    keep = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= rate
    return x * (keep / (1 - rate)).to(x.dtype)


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Rates that grow linearly from 0 to ``rate`` over ``depth`` blocks."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


def depthwise_conv(channels: int, width: int) -> nn.Conv1d:
    """Parameters of a depthwise causal convolution (weight [channels, 1, width], bias [channels])."""
    return nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1)


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
