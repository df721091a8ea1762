"""NCM: the class whose mean feature points the same way (nearest class mean; iCaRL's classifier without its images)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.heads.statistical import StatisticalHead


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
    """Nearest class mean: the class whose mean feature points the same way as the image's.

    Cosine of a feature with the mean of each class's normalised features.

    Paper: Mensink et al., Distance-Based Image Classification: Generalizing to New Classes at Near-Zero Cost, TPAMI
    2013; in continual learning Rebuffi et al., iCaRL, CVPR 2017, arXiv:1611.07725
    """

    name = "ncm"
    Module = NearestMean

    def transformed(self, features: Tensor) -> Tensor:
        """Of unit length: ``[b, d]``."""
        return F.normalize(features, dim=1)

    def fit(self) -> NearestMean:
        """The means' directions."""
        return NearestMean(F.normalize(torch.cat([of.mean for of in self.statistics], dim=1), dim=1))
