"""Class Gaussians as a classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Gaussians(nn.Module):
    """Scores ``offset_c - ½|whiten_c (f - mean_c)|²``: log densities of class Gaussians up to a constant.

    mean: [K, d], whiten: [K, d, d] or [1, d, d] for all, offset: [K]. Of features of m models side by side, each with
    a covariance of its own: mean: [K, m·d], whiten: [K, m·d, d], one model below the other.
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
        """``features: [b, m·d]`` to scores ``[b, K]``, some classes at a time: never more than 64 MiB in between."""
        count = len(self.mean)
        if features.numel() and not torch.compiler.is_compiling():  # an exported program is for any number of images
            count = max(1, 2**24 // features.numel())
        parts = [slice(start, start + count) for start in range(0, len(self.mean), count)]
        width = self.whiten.shape[2]
        distances = [
            self._distances(features[:, model], self.mean[:, model], self.whiten[:, model], parts)
            for model in (slice(start, start + width) for start in range(0, self.mean.shape[1], width))
        ]
        return self.offset - 0.5 * torch.stack(distances).sum(dim=0).T

    @staticmethod
    def _distances(features: Tensor, mean: Tensor, whiten: Tensor, parts: list[slice]) -> Tensor:
        """Squared distances ``[K, b]`` of one model's ``features: [b, d]``."""
        whiten = whiten.expand(len(mean), -1, -1)
        return torch.cat([((features - mean[p, None]) @ whiten[p].mT).square().sum(dim=2) for p in parts])
