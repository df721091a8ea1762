"""ETF: fixed class directions, all equally far apart, and a layer that is trained to turn features towards them."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig, Terms
from infssm.methods.core.losses import train_step
from infssm.methods.heads.class_statistics import cholesky, shrunk
from infssm.methods.heads.statistical import StatisticalConfig, StatisticalHead


class ETFClassifier(nn.Module):
    """Scores ``w_c · n / ‖n‖`` with ``n = neck f + shift``; ``directions: [K, d]``; those that are 0 score ``-inf``."""

    neck: Tensor
    shift: Tensor
    directions: Tensor

    def __init__(self, neck: Tensor, shift: Tensor, directions: Tensor) -> None:
        super().__init__()
        for name, tensor in (("neck", neck), ("shift", shift), ("directions", directions)):
            self.register_buffer(name, tensor)

    def forward(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to cosines ``[b, K]``."""
        cosines = F.linear(F.normalize(F.linear(features, self.neck, self.shift), dim=1), self.directions)
        return cosines.masked_fill((self.directions == 0).all(dim=1), -torch.inf)


class ETFConfig(StatisticalConfig):
    """Options of :class:`ETF`."""

    steps: int = Field(200, ge=1, description="of SGD, each with one sample of every class (Mamba-FSCIL: 200)")
    lr: float = Field(0.25, gt=0, description="of SGD with momentum 0.9, cosine to 0 (Mamba-FSCIL, CIFAR-100: 0.25)")
    shrinkage: float = Field(0.1, gt=0, le=1, description="share of the identity in the covariance of the samples")


@register_method
class ETF(StatisticalHead):
    """Fixed class directions, all at the same angle (a simplex); a layer is trained to turn features towards them.

    The loss is dot regression, ``5 mean (w_c · n - 1)²`` with n the layer's output at unit length, on samples of class
    Gaussians that share one covariance. The number of all classes must be known before the first.

    Paper: Yang et al., Neural Collapse Inspired Feature-Classifier Alignment for Few-Shot Class-Incremental Learning,
    ICLR 2023, arXiv:2302.03004; so Li et al., Mamba-FSCIL, 2024, arXiv:2407.06136
    """

    name = "etf"
    Config: ClassVar[type[ComponentConfig]] = ETFConfig
    config: ETFConfig
    Module = ETFClassifier
    needs_total: ClassVar[str | None] = "its class directions are fixed beforehand, all at the same angle"

    def fit(self) -> ETFClassifier:
        """Train in coordinates in which samples are white noise around their class mean, and of length 1 on average."""
        seen = self.statistics[0].seen.nonzero().flatten()
        directions = simplex(self.num_classes).to(seen.device)
        maps, centre, means = [], [], []
        for statistics in self.statistics:
            factor = cholesky(shrunk(statistics.pooled, self.config.shrinkage))
            maps.append(torch.linalg.inv(factor))
            centre.append(statistics.mean[seen].mean(dim=0))
            means.append((statistics.mean[seen] - centre[-1]) @ maps[-1].T)
        mean = torch.cat(means, dim=1)
        radius = (mean.square().sum(dim=1).mean() + mean.shape[1]).sqrt()
        with torch.enable_grad():
            neck, shift = self._turned(mean / radius, 1 / radius, directions[seen])
        # Each model's part of the features has a map of its own.
        parts = zip(neck.chunk(len(maps), dim=1), maps, strict=True)
        whole = torch.cat([part @ one for part, one in parts], dim=1) / radius
        shown = torch.zeros_like(directions)
        shown[seen] = directions[seen]
        return ETFClassifier(whole, shift - whole @ torch.cat(centre), shown)

    def _turned(self, mean: Tensor, spread: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Neck ``[K, d]`` and shift ``[K]`` trained on ``mean + spread · noise``; both ``[n, ...]``, float64.

        They start from the scores of the nearest mean, which decide as LDA does: in these coordinates both are one.
        """
        neck = directions.T @ mean
        shift = -0.5 * directions.T @ mean.square().sum(dim=1)
        scale = 1 / F.linear(mean, neck, shift).norm(dim=1).mean().clamp(min=1e-12)
        parameters = [(scale * tensor).requires_grad_() for tensor in (neck, shift)]
        optimizer = torch.optim.SGD(parameters, lr=self.config.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.config.steps)
        # Drawn anew with every task that brings classes; a class that is forgotten leaves no trace in the seed.
        rng = torch.Generator().manual_seed(self.context.seed + max(self.task_of, default=0))

        def loss() -> Terms:
            noise = torch.randn(mean.shape, generator=rng, dtype=torch.float64).to(mean.device)
            return {"dot": dot_regression(F.linear(mean + spread * noise, *parameters), directions)}

        for _ in range(self.config.steps if len(mean) else 0):
            train_step(loss, optimizer, after_update=schedule.step)
        return parameters[0].detach(), parameters[1].detach()


def simplex(count: int) -> Tensor:
    """``count`` unit vectors ``[count, count]`` whose cosines are all ``-1/(count - 1)``: float64.

    The papers turn them by a random rotation, which a trained layer before them undoes.
    """
    centred = torch.eye(count, dtype=torch.float64) - 1 / count
    vectors: Tensor = centred * (count / max(count - 1, 1)) ** 0.5
    return vectors


def dot_regression(outputs: Tensor, directions: Tensor) -> Tensor:
    """``10 · mean ½ (w · n - 1)²`` with n the ``outputs: [b, K]`` at unit length and w their ``directions: [b, K]``."""
    dots: Tensor = (F.normalize(outputs, dim=1) * directions).sum(dim=1)
    loss: Tensor = 5 * (dots - 1).square().mean()
    return loss
