"""NCM, LDA and GDA: classes are their mean feature, with no covariance, one for all of them, or one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig
from infssm.methods.core.head import linear
from infssm.methods.heads.class_statistics import ClassStatistics, cholesky, shrunk
from infssm.methods.heads.gaussians import Gaussians, average_over_models
from infssm.methods.heads.statistical import StatisticalConfig, StatisticalHead


class NearestMean(nn.Module):
    """Cosines of features with ``means: [K, d]`` of unit length; a class whose mean is 0 scores ``-inf``."""

    means: Tensor

    def __init__(self, means: Tensor) -> None:
        super().__init__()
        self.register_buffer("means", means)

    def forward(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to cosines ``[b, K]``."""
        cosines = F.linear(F.normalize(features, dim=1), self.means)
        return cosines.masked_fill((self.means == 0).all(dim=1), -torch.inf)


@register_method
class NCM(StatisticalHead):
    """Nearest class mean: the class whose mean feature has the direction closest to the image's.

    Cosine of a feature with the mean of each class's normalised features.

    Paper: Mensink et al., Distance-Based Image Classification: Generalizing to New Classes at Near-Zero Cost, TPAMI
    2013; in continual learning Rebuffi et al., iCaRL, CVPR 2017, arXiv:1611.07725
    """

    name = "ncm"
    Module = NearestMean

    def transformed(self, features: Tensor) -> Tensor:
        """Features of unit length: ``[b, d]``."""
        return F.normalize(features, dim=1)

    def fit(self) -> NearestMean:
        """The means' directions."""
        return NearestMean(F.normalize(torch.cat([of.mean for of in self.statistics], dim=1), dim=1))


class GaussianConfig(StatisticalConfig):
    """Options of every head that compares likelihoods of classes."""

    prior: Literal["class", "task"] = Field(
        "class",
        description="what is equally likely a priori: every 'class', or every 'task', so that a class "
        "of a small task counts for more than one of a large base; AA, a mean over tasks, asks for 'task'",
    )
    alpha: float = Field(
        0.001, gt=0, le=1, description="share of the identity in the covariance, 1e-4 to .05; more for few images"
    )


class GaussianHead(StatisticalHead):
    """Classes are compared by the likelihood of a feature times a prior."""

    Config: ClassVar[type[ComponentConfig]] = GaussianConfig
    config: GaussianConfig

    def log_prior(self) -> Tensor:
        """Log prior of every class, up to a constant that is the same for all: [K]."""
        if self.config.prior == "class":
            sizes = [1] * len(self.task_of)
        else:  # the number of classes that the task of each class brought; 1 for classes without images
            sizes = [1 if task < 0 else self.task_of.count(task) for task in self.task_of]
        return -torch.tensor(sizes, dtype=torch.float64, device=self.context.device).log()


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
    Module = linear

    def fit(self) -> nn.Linear:
        """See :func:`lda_classifier`."""
        weight, bias = lda_classifier(self.statistics, self.config.alpha)
        return linear(weight, bias + self.log_prior())


def lda_classifier(models: Sequence[ClassStatistics], alpha: float) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis with equal priors: ``weight: [K, m·d]``, ``bias: [K]``.

    Logits ``fᵀS⁻¹μ_c - ½μ_cᵀS⁻¹μ_c`` with S the shrunk pooled covariance; of m models, whose features stand side by
    side, their mean. A class without images gets ``-inf``.
    """
    weights, biases = [], []
    for statistics in models:
        factor = cholesky(shrunk(statistics.pooled, alpha))
        weight = torch.cholesky_solve(statistics.mean.T, factor).T
        bias = -0.5 * (weight * statistics.mean).sum(dim=1)
        weights.append(weight)
        biases.append(bias.masked_fill(~statistics.seen, -torch.inf))
    return torch.cat(weights, dim=1) / len(weights), torch.stack(biases).mean(dim=0)


class GDAConfig(GaussianConfig):
    """Options of :class:`GDA`."""

    beta: float = Field(0.75, ge=0, le=1, description="share of the pooled covariance; more for few images per class")


@register_method
class GDA(GaussianHead):
    """Means and covariances of each class's features, no images; the class whose Gaussian fits best. Recommended.

    Where the covariances of all classes need more than 256 MiB, the pooled one is used for all classes, as in lda.

    Paper: Friedman, Regularized Discriminant Analysis, JASA 1989; in continual learning Goswami et al., FeCAM, NeurIPS
    2023, arXiv:2309.14062
    """

    name = "gda"
    Config = GDAConfig
    config: GDAConfig
    Module: ClassVar[Callable[..., nn.Module]] = Gaussians

    def fit(self) -> Gaussians:
        """See :func:`gaussian_classifier`; of several models the mean of their scores."""
        return average_over_models(self.statistics, self.config.alpha, self.config.beta, self.log_prior())

    def gaussians(self) -> Gaussians:
        """The fitted module itself: here scores and distances use the same covariances."""
        module = self.fitted_module
        assert isinstance(module, Gaussians)
        return module
