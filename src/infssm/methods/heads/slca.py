"""SLCA's classifier alignment (Zhang et al. 2023): a linear classifier trained on samples of class Gaussians."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig, Terms
from infssm.methods.core.head import linear
from infssm.methods.core.losses import train_step
from infssm.methods.heads.class_statistics import ClassStatistics, cholesky
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
    Config: ClassVar[type[ComponentConfig]] = SLCAConfig
    config: SLCAConfig
    Module = linear

    def fit(self) -> nn.Linear:
        """Align a classifier that starts from LDA's solution, whose scale does not depend on how tasks were trained."""
        seen = self.statistics[0].seen.nonzero().flatten()
        # Of several models LDA's solutions are averaged; classes without images take no part.
        starts = [lda_classifier(statistics, alpha=0.05) for statistics in self.statistics]
        weight = torch.cat([weight for weight, _ in starts], dim=1) / len(starts)
        bias = torch.stack([bias for _, bias in starts]).mean(dim=0)
        with torch.enable_grad():
            weight[seen], bias[seen] = self._aligned(seen, weight[seen], bias[seen])
        return linear(weight, bias)

    def _aligned(self, seen: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """``weight: [n, d]`` and ``bias: [n]`` of the seen classes after training on samples, in float64."""
        mean = torch.cat([statistics.mean[seen] for statistics in self.statistics], dim=1)
        factors = [_factors(statistics, seen) for statistics in self.statistics]
        tasks = torch.tensor(self.task_of, device=seen.device)[seen]
        blocks = [(tasks == task).nonzero().flatten() for task in range(int(tasks.max()) + 1)] if len(seen) else []
        # Drawn anew with every task that brings classes; a class that is forgotten leaves no trace in the seed.
        rng = torch.Generator().manual_seed(self.context.seed + max(len(blocks) - 1, 0))
        parameters = [tensor.clone().requires_grad_() for tensor in (weight, bias)]
        optimizer = torch.optim.SGD(parameters, lr=self.config.lr, momentum=0.9)
        batches = self.config.samples  # as many steps per epoch as samples of a class: each step has one of each
        steps = self.config.epochs * batches if blocks else 0
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
        targets = torch.arange(len(seen), device=seen.device)

        def loss() -> Terms:
            noise = (
                torch.randn(mean.shape, generator=rng, dtype=torch.float64).to(seen.device).chunk(len(factors), dim=1)
            )
            x = mean + torch.cat([(f @ n[:, :, None])[:, :, 0] for f, n in zip(factors, noise, strict=True)], dim=1)
            logits = F.linear(x, parameters[0], parameters[1])
            norms = torch.stack([logits[:, block].norm(dim=1) for block in blocks]).mean(dim=0)
            return {"ce": F.cross_entropy(logits / (norms[:, None] + 1e-7) / self.config.temperature, targets)}

        for _ in range(steps):
            train_step(loss, optimizer, after_update=schedule.step)
        return parameters[0].detach(), parameters[1].detach()


def _factors(statistics: ClassStatistics, seen: Tensor) -> Tensor:
    """Lower factors of the covariances of the seen classes, [n, d, d] (``[1, d, d]`` of the pooled one), float64."""
    eye = torch.eye(statistics.mean.shape[1], dtype=torch.float64, device=seen.device)
    if statistics.triangles is None:
        return cholesky(statistics.pooled + _JITTER * eye)[None]
    return torch.stack([cholesky(statistics.covariance(label) + _JITTER * eye) for label in seen.tolist()])
