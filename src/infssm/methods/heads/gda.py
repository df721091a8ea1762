"""GDA: Gaussian classes, each with its own covariance blended with the pooled one (Friedman 1989)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig, TaskInfo
from infssm.methods.core.head import Features
from infssm.methods.heads.class_statistics import ClassStatistics, cholesky, shrunk
from infssm.methods.heads.statistical import GaussianConfig, GaussianHead


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
        if (
            features.numel() and not torch.compiler.is_compiling()
        ):  # an exported program must work for any number of images
            count = max(1, 2**24 // features.numel())
        width = self.whiten.shape[2]
        distances: list[Tensor] = []
        for start in range(0, self.mean.shape[1], width):  # one model after the other
            model = slice(start, start + width)
            whiten = self.whiten[:, model].expand(len(self.mean), -1, -1)
            parts = []
            for first in range(0, len(self.mean), count):
                part = slice(first, first + count)
                parts.append(
                    ((features[:, model] - self.mean[part, None, model]) @ whiten[part].mT).square().sum(dim=2)
                )
            distances.append(torch.cat(parts))
        return self.offset - 0.5 * torch.stack(distances).sum(dim=0).T


class GDAConfig(GaussianConfig):
    """Options of :class:`GDA`."""

    alpha: float = Field(0.001, gt=0, le=1, description="share of the identity; more for few images per class")
    beta: float = Field(0.75, ge=0, le=1, description="share of the pooled covariance; more for few images per class")


@register_method
class GDA(GaussianHead):
    """Means and covariances of each class's features, no images; the class whose Gaussian fits best. Recommended.

    Where the covariances of all classes need more than 256 MiB, the pooled one is used for all classes, as in lda.

    Paper: Friedman, Regularized Discriminant Analysis, JASA 1989; in continual learning Goswami et al., FeCAM, NeurIPS
    2023, arXiv:2309.14062
    """

    name = "gda"
    Config: ClassVar[type[ComponentConfig]] = GDAConfig
    config: GDAConfig
    Module = Gaussians
    per_class: ClassVar[bool] = True

    def fit(self, rows: Features, task: TaskInfo) -> Gaussians:  # noqa: ARG002
        """See :func:`gaussian_classifier`; of several models the mean of their scores."""
        models = [gaussian_classifier(of, self.config.alpha, self.config.beta) for of in self.gather(rows)]
        return Gaussians(*averaged(models, self.log_prior()))


def gaussian_classifier(statistics: ClassStatistics, alpha: float, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quadratic discriminant analysis with equal priors and class covariances ``(1-β)Σ_c + βΣ̄``, shrunk by α.

    Returns ``mean: [K, d]``, ``whiten: [K, d, d]`` (``[1, d, d]`` where only the pooled covariance is kept) and
    ``offset: [K]``; the score of class c is ``offset_c - ½|whiten_c (f - mean_c)|²``.
    """
    if statistics.covariance is None:
        whiten, offset = _whitening(shrunk(statistics.pooled, alpha))
        whiten, offset = whiten[None], offset.expand(len(statistics.count))
    else:
        whiten = torch.empty_like(statistics.covariance)
        offset = torch.zeros_like(statistics.count)
        for label in statistics.seen.nonzero().flatten().tolist():  # one at a time, float64 for one class only
            own = (1 - beta) * statistics.covariance[label].double() + beta * statistics.pooled
            found, offset[label] = _whitening(shrunk(own, alpha))
            whiten[label] = found
        whiten[~statistics.seen] = 0
    return statistics.mean, whiten, offset.masked_fill(~statistics.seen, -torch.inf)


def averaged(models: Sequence[tuple[Tensor, Tensor, Tensor]], log_prior: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One classifier whose scores are the mean over models of their :func:`gaussian_classifier`, and the prior's.

    Features of the models stand side by side: ``mean: [K, m·d]``, ``whiten: [K, m·d, d]`` (or ``[1, m·d, d]``) one
    model below the other, ``offset: [K]``. Across models features are taken to be independent.
    """
    means, whitens, offsets = zip(*models, strict=True)
    whiten = torch.cat(whitens, dim=1) / len(models) ** 0.5
    return torch.cat(means, dim=1), whiten, torch.stack(offsets).mean(dim=0) + log_prior


def _whitening(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """``L⁻¹`` and ``-½ log det`` of ``covariance = LLᵀ: [d, d]``."""
    factor = cholesky(covariance)
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye, upper=False), -factor.diagonal().log().sum()
