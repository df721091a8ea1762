"""Class Gaussians as a classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Gaussians(nn.Module):
    """Scores ``offset_c - ½|whiten_c (f - mean_c)|²``: log densities of class Gaussians up to a constant.

    mean: [K, d], whiten: [K, d, d] or [1, d, d] for all, offset: [K].
    """

    mean: Tensor
    whiten: Tensor
    offset: Tensor

    def __init__(self, mean: Tensor, whiten: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("whiten", whiten)
        self.register_buffer("offset", offset)

    def forward(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to scores ``[b, K]``, some classes at a time: never more than 64 MiB in between."""
        count = max(1, 2**24 // features.numel()) if features.numel() else len(self.mean)
        whiten = self.whiten.expand(len(self.mean), -1, -1)
        parts = [slice(start, start + count) for start in range(0, len(self.mean), count)]
        distances = [((features - self.mean[p, None]) @ whiten[p].mT).square().sum(dim=2) for p in parts]
        return self.offset - 0.5 * torch.cat(distances).T
