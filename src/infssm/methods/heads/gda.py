"""GDA: Gaussian classes, each with its own covariance blended with the pooled one (Friedman 1989)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pydantic import Field
from torch import nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig
from infssm.methods.heads.gaussians import Gaussians, average_over_models, gaussian_classifier
from infssm.methods.heads.statistical import GaussianConfig, GaussianHead


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
    Module: ClassVar[Callable[..., nn.Module]] = Gaussians

    def fit(self) -> Gaussians:
        """See :func:`gaussian_classifier`; of several models the mean of their scores."""
        models = [gaussian_classifier(of, self.config.alpha, self.config.beta) for of in self.statistics]
        return average_over_models(models, self.log_prior())

    def gaussians(self) -> Gaussians:
        """The fitted module itself: here scores and distances use the same covariances."""
        module = self.fitted_module
        assert isinstance(module, Gaussians)
        return module
