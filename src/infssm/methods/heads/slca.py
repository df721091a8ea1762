"""SLCA's classifier alignment (Zhang et al. 2023): a linear classifier trained on samples of class Gaussians."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig, TaskInfo, Terms
from infssm.methods.core.head import Features, linear
from infssm.methods.core.step import train_step
from infssm.methods.heads.class_statistics import ClassStatistics, cholesky
from infssm.methods.heads.lda import lda_classifier
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
    per_class: ClassVar[bool] = True

    def reset(self) -> None:
        """Discard statistics and tasks."""
        super().reset()
        self.stops: list[int] = []

    def fit(self, rows: Features, task: TaskInfo) -> nn.Linear:
        """Align a classifier that starts from LDA's solution, whose scale does not depend on how tasks were trained."""
        models = self.gather(rows)
        seen = models[0].seen
        stop = self.num_classes if task.classes is None else task.classes.stop
        self.stops = [*(s for s in self.stops if s < stop), stop]
        # Of several models LDA's solutions are averaged; classes without images start at 0.
        starts = [lda_classifier(statistics, alpha=0.05) for statistics in models]
        weight = torch.cat([weight for weight, _ in starts], dim=1) / len(models)
        bias = torch.stack([bias for _, bias in starts]).mean(dim=0).masked_fill(~seen, 0)
        rng = torch.Generator().manual_seed(self.context.seed + task.index)
        with torch.enable_grad():
            weight, bias = self._aligned(models, weight, bias, rng)
        return linear(weight, bias.masked_fill(~seen, -torch.inf))

    def _aligned(
        self, models: list[ClassStatistics], weight: Tensor, bias: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """``weight: [K, d]`` and ``bias: [K]`` after training on samples, in float64."""
        seen = models[0].seen.nonzero().flatten()
        mean = torch.cat([statistics.mean[seen] for statistics in models], dim=1)
        factors = [_factors(statistics, seen) for statistics in models]
        blocks = [slice(*ends) for ends in pairwise([0, *self.stops])]
        parameters = [tensor[: self.stops[-1]].clone().requires_grad_() for tensor in (weight, bias)]
        optimizer = torch.optim.SGD(parameters, lr=self.config.lr, momentum=0.9)
        batches = self.config.samples  # as many steps per epoch as samples of a class: each step has one of each
        steps = self.config.epochs * batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

        def loss() -> Terms:
            noise = (
                torch.randn(mean.shape, generator=rng, dtype=torch.float64).to(seen.device).chunk(len(models), dim=1)
            )
            x = mean + torch.cat([(f @ n[:, :, None])[:, :, 0] for f, n in zip(factors, noise, strict=True)], dim=1)
            logits = F.linear(x, parameters[0], parameters[1])
            norms = torch.stack([logits[:, block].norm(dim=1) for block in blocks]).mean(dim=0)
            return {"ce": F.cross_entropy(logits / (norms[:, None] + 1e-7) / self.config.temperature, seen)}

        for _ in range(steps):
            train_step(loss, optimizer, after_update=schedule.step)
        for tensor, trained in zip((weight, bias), parameters, strict=True):
            tensor[: self.stops[-1]] = trained.detach()
        return weight, bias

    def state_dict(self) -> dict[str, Any]:
        """The statistics, and the end of each task's block of classes."""
        return super().state_dict() | {"stops": list(self.stops)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        super().load_state_dict(state)
        self.stops = list(state["stops"])


def _factors(statistics: ClassStatistics, seen: Tensor) -> Tensor:
    """Lower factors of the covariances of the seen classes, [n, d, d] (``[1, d, d]`` of the pooled one), float64."""
    eye = torch.eye(len(statistics.pooled), dtype=torch.float64, device=seen.device)
    if statistics.covariance is None:
        return cholesky(statistics.pooled + _JITTER * eye)[None]
    return torch.stack([cholesky(statistics.covariance[label].double() + _JITTER * eye) for label in seen.tolist()])
