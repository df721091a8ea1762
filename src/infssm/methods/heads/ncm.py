"""NCM: the class whose mean feature points the same way (nearest class mean; iCaRL's classifier without its images)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.methods._build import register_method
from infssm.methods._contract import TaskInfo
from infssm.methods._distributed import sum_over_processes
from infssm.methods._head import Features, FittedHead


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
class NCM(FittedHead):
    """Nearest class mean: the class whose mean feature points the same way as the image's.

    Cosine of a feature with the mean of each class's normalised features.

    Paper: Mensink et al., Distance-Based Image Classification: Generalizing to New Classes at Near-Zero Cost, TPAMI
    2013; in continual learning Rebuffi et al., iCaRL, CVPR 2017, arXiv:1611.07725
    """

    name = "ncm"
    Module = NearestMean

    def reset(self) -> None:
        """No means."""
        self.means: Tensor | None = None

    def fit(self, rows: Features, task: TaskInfo) -> NearestMean:  # noqa: ARG002
        """Means of the task's classes from its images; those of other classes stay."""
        sums = torch.zeros(self.num_classes, self.num_features, dtype=torch.float64, device=self.context.device)
        for row in rows:
            sums.index_add_(0, row.y, F.normalize(row.new.double(), dim=1))
        means = F.normalize(sum_over_processes([sums])[0], dim=1)
        if self.means is not None:
            fresh = (means != 0).any(dim=1, keepdim=True)
            means = torch.where(fresh, means, self.means.to(means.device))
        self.means = means
        return NearestMean(means)

    def state_dict(self) -> dict[str, Any]:
        """The means so far."""
        return {"means": self.means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.means = state["means"]
