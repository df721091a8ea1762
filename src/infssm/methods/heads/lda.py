"""LDA: Gaussian classes of one covariance (Fisher 1936; in streams Hayes and Kanan 2020), linear in the features."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig
from infssm.methods.core.head import linear
from infssm.methods.heads.class_statistics import ClassStatistics, cholesky, shrunk
from infssm.methods.heads.statistical import GaussianConfig, GaussianHead


class LDAConfig(GaussianConfig):
    """Options of :class:`LDA`."""

    alpha: float = Field(0.001, gt=0, le=1, description="share of the identity in the covariance; 1e-4 to .05")


@register_method
class LDA(GaussianHead):
    """Class means and one covariance of features, no images; a linear classifier follows from them.

    Linear discriminant analysis. It is a linear layer like the model's own classifier, so the model is saved and
    exported as usual, except with additional views. The shared covariance is computed from those of the classes, which
    are kept so that a class can be forgotten.

    Paper: Fisher, The Use of Multiple Measurements in Taxonomic Problems, 1936; in continual learning Hayes and Kanan,
    Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis, CVPR Workshops 2020, arXiv:1909.01520
    """

    name = "lda"
    Config: ClassVar[type[ComponentConfig]] = LDAConfig
    config: LDAConfig
    Module = linear

    def fit(self) -> nn.Linear:
        """See :func:`lda_classifier`; of several models the mean of their scores."""
        found = [lda_classifier(statistics, self.config.alpha) for statistics in self.statistics]
        weight = torch.cat([weight for weight, _ in found], dim=1) / len(found)
        return linear(weight, torch.stack([bias for _, bias in found]).mean(dim=0) + self.log_prior())


def lda_classifier(statistics: ClassStatistics, alpha: float) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis with equal priors: ``weight: [K, d]``, ``bias: [K]``.

    Logits ``fᵀS⁻¹μ_c - ½μ_cᵀS⁻¹μ_c`` with S the shrunk pooled covariance; a class without images gets ``-inf``.
    """
    factor = cholesky(shrunk(statistics.pooled, alpha))
    weight = torch.cholesky_solve(statistics.mean.T, factor).T
    bias = -0.5 * (weight * statistics.mean).sum(dim=1)
    return weight, bias.masked_fill(~statistics.seen, -torch.inf)
