"""RanPAC (McDonnell et al. 2023): ridge regression on random ReLU features, from Gram matrices summed over tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm._processes import sum_over_processes, this_share
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig, TaskInfo
from infssm.methods.core.head import Features, FittedHead
from infssm.methods.core.views import FittedConfig

RIDGES = tuple(10.0**power for power in range(-8, 9))
_HELD_OUT = 5
"""Every fifth row is held out to select the ridge."""


class RanPACConfig(FittedConfig):
    """Options of :class:`RanPAC`."""

    width: int | None = Field(
        None, ge=1, description="random features M; null: 16 times the features, at most 10,000 (8·M² bytes are kept)"
    )


class RandomFeatures(nn.Module):
    """``relu(f @ projection) @ weightᵀ``; projection: [d, M], weight: [K, M], offset: [K] (0, or -inf if unseen)."""

    projection: Tensor
    weight: Tensor
    offset: Tensor

    def __init__(self, projection: Tensor, weight: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("projection", projection)
        self.register_buffer("weight", weight)
        self.register_buffer("offset", offset)

    def forward(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to scores ``[b, K]``."""
        return F.linear(F.relu(features @ self.projection), self.weight, self.offset)


@register_method
class RanPAC(FittedHead):
    """Random ReLU features and ridge regression; exact for a backbone that stays, stale where it moves.

    A fifth of each task's images is held out to select the ridge, and their errors are summed over tasks: a large first
    task counts for as many images as it had, and none of them is kept.

    Paper: McDonnell et al., RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023,
    arXiv:2307.02251
    """

    name = "ranpac"
    Config: ClassVar[type[ComponentConfig]] = RanPACConfig
    config: RanPACConfig
    Module = RandomFeatures

    def reset(self) -> None:
        """No sums."""
        self.gram: Tensor | None = None
        self.cross: Tensor | None = None
        self.errors: Tensor | None = None
        """For every ridge the squared errors on held-out images, summed over the ends of tasks: float64."""

    @property
    def width(self) -> int:
        """Number M of random features."""
        return self.config.width or min(10_000, 16 * self.num_features)

    def projection(self) -> Tensor:
        """The fixed random weights, float32 [d, M]; they follow from the run's seed."""
        rng = torch.Generator().manual_seed(self.context.seed)
        return torch.randn(self.num_features, self.width, generator=rng).to(self.context.device)

    def fit(self, rows: Features, task: TaskInfo) -> RandomFeatures:  # noqa: ARG002 - labels say which classes
        """Add the task's images to the sums; a fifth of them selects the ridge, then all are fitted with it."""
        projection = self.projection()
        fit_gram, fit_cross, held_gram, held_cross = self._sums(rows, projection)
        if self.gram is not None and self.cross is not None:
            fit_gram += self.gram.to(fit_gram.device)
            fit_cross += self.cross.to(fit_cross.device)
        errors = ridge_errors(fit_gram, fit_cross, held_gram, held_cross)
        self.errors = errors if self.errors is None else self.errors + errors
        self.gram, self.cross = fit_gram.add_(held_gram), fit_cross.add_(held_cross)
        weight = ridge_classifier(self.gram, self.cross, RIDGES[int(self.errors.argmin())])
        assert weight is not None  # G grew by a positive matrix since its errors were found to be finite
        seen = (self.cross != 0).any(dim=0)
        offset = torch.zeros(len(seen), dtype=weight.dtype, device=weight.device).masked_fill(~seen, -torch.inf)
        return RandomFeatures(projection, weight, offset)

    def _sums(self, rows: Features, projection: Tensor) -> list[Tensor]:
        """Gram and cross sums of the rows to fit and of those held out: [M, M], [M, K], [M, M], [M, K]."""
        world = this_share().world
        shapes = [(self.width, self.width), (self.width, self.num_classes)] * 2
        sums = [torch.zeros(shape, dtype=torch.float64, device=projection.device) for shape in shapes]
        position = this_share().number  # of the row among those of all processes, which are dealt in turn
        for row in rows:
            hidden = F.relu(row.new.to(projection.dtype) @ projection).double()
            targets = F.one_hot(row.y, self.num_classes).double()
            index = position + world * torch.arange(len(hidden), device=hidden.device)
            held = index % _HELD_OUT == _HELD_OUT - 1
            position += world * len(hidden)
            for part, start in ((~held, 0), (held, 2)):
                sums[start].addmm_(hidden[part].T, hidden[part])
                sums[start + 1].addmm_(hidden[part].T, targets[part])
        return [sum_over_processes([part])[0] for part in sums]  # one at a time: no second copy of them all

    def state_dict(self) -> dict[str, Any]:
        """The sums so far."""
        return super().state_dict() | {"gram": self.gram, "cross": self.cross, "errors": self.errors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        super().load_state_dict(state)
        self.gram, self.cross = state["gram"], state["cross"]
        self.errors = state["errors"]


def ridge_errors(
    gram: Tensor, cross: Tensor, held_gram: Tensor, held_cross: Tensor, ridges: Sequence[float] = RIDGES
) -> Tensor:
    """Squared error on held-out rows for every ridge, up to a number that is the same for all.

    grams: [M, M], crosses: [M, K]; on the CPU, float64, ``inf`` where there is no solution.
    """
    found = [ridge_classifier(gram, cross, ridge) for ridge in ridges]
    errors = [torch.inf if w is None else float(squared_error(w, held_gram, held_cross)) for w in found]
    return torch.tensor(errors, dtype=torch.float64)


def ridge_classifier(gram: Tensor, cross: Tensor, ridge: float) -> Tensor | None:
    """``(G + λI)⁻¹Q`` transposed, ``[K, M]``; ``None`` where G + λI is singular in float64.

    gram: [M, M], cross: [M, K].
    """
    factor, info = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return None if int(info) else torch.cholesky_solve(cross, factor).T


def squared_error(weight: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """``|HWᵀ - Y|²`` up to the constant ``|Y|²``, from ``gram = HᵀH: [M, M]`` and ``cross = HᵀY: [M, K]``."""
    return ((weight @ gram) * weight).sum() - 2 * (weight.T * cross).sum()
