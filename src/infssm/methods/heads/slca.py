"""SLCA and ETF: heads that are trained on samples of class Gaussians."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import Terms
from infssm.methods.core.head import linear
from infssm.methods.core.losses import train_step
from infssm.methods.heads.class_statistics import cholesky, shrunk
from infssm.methods.heads.gda import lda_classifier
from infssm.methods.heads.statistical import StatisticalConfig, StatisticalHead

_JITTER = 1e-4
"""Added to the variances before sampling, as in the paper."""


class SLCAConfig(StatisticalConfig):
    """Options of :class:`SLCA`."""

    samples: int = Field(256, ge=1, description="drawn of each class and epoch (paper: 256)")
    epochs: int = Field(3, ge=1, description="passes over fresh samples")
    lr: float = Field(0.01, gt=0, description="of SGD with momentum 0.9, cosine to 0 (paper: 0.01)")
    temperature: float = Field(0.1, gt=0, description="of the normalised logits (paper: 0.1)")


@register_method
class SLCA(StatisticalHead):
    """Class means and covariances of features; a linear classifier trained on samples of them, logits normalised.

    Paper: Zhang et al., SLCA: Slow Learner with Classifier Alignment, ICCV 2023, arXiv:2303.05118
    """

    name = "slca"
    Config = SLCAConfig
    config: SLCAConfig
    Module = linear

    def fit(self) -> nn.Linear:
        """Align a classifier that starts from LDA's solution, whose scale does not depend on how tasks were trained."""
        seen = self.statistics[0].seen.nonzero().flatten()
        weight, bias = lda_classifier(self.statistics, alpha=0.05)  # classes without images take no part
        weight[seen], bias[seen] = self._aligned(seen, weight[seen], bias[seen])
        return linear(weight, bias)

    def _aligned(self, seen: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """``weight: [n, d]`` and ``bias: [n]`` of the seen classes after training on samples, in float64."""
        mean = torch.cat([statistics.mean[seen] for statistics in self.statistics], dim=1)
        factors = []  # lower factors of covariances, [n, d, d], or [1, d, d] of the pooled one
        for one in self.statistics:
            jitter = _JITTER * torch.eye(one.mean.shape[1], dtype=torch.float64, device=seen.device)
            own = [one.pooled] if one.triangles is None else [one.covariance(label) for label in seen.tolist()]
            factors.append(torch.stack([cholesky(covariance + jitter) for covariance in own]))
        tasks = torch.tensor(self.task_of, device=seen.device)[seen]
        blocks = [(tasks == task).nonzero().flatten() for task in range(int(tasks.max()) + 1)] if len(seen) else []
        targets = torch.arange(len(seen), device=seen.device)

        def loss(noise: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            parts = zip(factors, noise.chunk(len(factors), dim=1), strict=True)
            x = mean + torch.cat([(factor @ part[:, :, None])[:, :, 0] for factor, part in parts], dim=1)
            logits = F.linear(x, weight, bias)
            norms = torch.stack([logits[:, block].norm(dim=1) for block in blocks]).mean(dim=0)
            return F.cross_entropy(logits / (norms[:, None] + 1e-7) / self.config.temperature, targets)

        # As many steps per epoch as samples of a class: each step has one of each.
        steps = self.config.epochs * self.config.samples if blocks else 0
        return train_on_noise(self, (weight, bias), mean.shape, loss, lr=self.config.lr, steps=steps)


@torch.enable_grad()
def train_on_noise(
    head: StatisticalHead,
    start: tuple[Tensor, Tensor],
    shape: torch.Size,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    lr: float,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Weight and bias, float64, after steps from ``start`` down ``loss(noise, weight, bias)``.

    The noise is standard normal, of the given ``shape``. SGD with momentum 0.9, the rate falls from ``lr`` to 0 as a
    cosine.
    """
    parameters = [tensor.detach().clone().requires_grad_() for tensor in start]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    # Drawn anew with every task that brings classes; a class that is forgotten leaves no trace in the seed.
    rng = torch.Generator().manual_seed(head.context.seed + max(head.task_of, default=0))

    def terms() -> Terms:
        noise = torch.randn(shape, generator=rng, dtype=torch.float64).to(parameters[0].device)
        return {"loss": loss(noise, *parameters)}

    for _ in range(steps):
        train_step(terms, optimizer, after_update=schedule.step)
    return parameters[0].detach(), parameters[1].detach()


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
    Config = ETFConfig
    config: ETFConfig
    Module = ETFClassifier
    why_needs_total = "its class directions are fixed beforehand, all at the same angle"

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

        def loss(noise: Tensor, neck: Tensor, shift: Tensor) -> Tensor:
            return dot_regression(F.linear(mean + spread * noise, neck, shift), directions)

        steps = self.config.steps if len(mean) else 0
        return train_on_noise(self, (scale * neck, scale * shift), mean.shape, loss, lr=self.config.lr, steps=steps)


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
