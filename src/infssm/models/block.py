"""The pre-norm residual block of the Mamba family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infssm.models.mixer import SSMMixer
from infssm.models.state import LayerState
from infssm.ops import add_rms_norm


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
