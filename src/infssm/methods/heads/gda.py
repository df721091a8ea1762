"""GDA: Gaussian classes, each with its own covariance blended with the pooled one (Friedman 1989)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig, TaskInfo
from infssm.methods.core.head import Features
from infssm.methods.heads._fitting import averaged, gaussian_classifier
from infssm.methods.heads._gaussians import Gaussians
from infssm.methods.heads._statistical import GaussianConfig, GaussianHead


class GDAConfig(GaussianConfig):
    """Options of :class:`GDA`."""

    alpha: float = Field(0.001, gt=0, le=1, description="share of the identity; more for few images per class")
    beta: float = Field(0.75, ge=0, le=1, description="share of the pooled covariance; more for few images per class")


@register_method
class GDA(GaussianHead):
    """Class means and covariances of features, no images; the class whose Gaussian explains a feature best. To use.

    Where covariances of all classes take more than 256 MiB the pooled one serves for all, as in lda.

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
