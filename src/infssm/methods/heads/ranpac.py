"""RanPAC (McDonnell et al. 2023): ridge regression on random ReLU features, from Gram matrices summed over tasks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm._processes import gather_rows, sum_over_processes, this_share
from infssm.errors import ConfigError
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import TaskInfo
from infssm.methods.core.head import FeatureBatch
from infssm.methods.core.views import FittedConfig
from infssm.methods.heads.statistical import StatisticalHead

RIDGES = tuple(10.0**power for power in range(-8, 9))
HELD_OUT = 5
"""Every fifth image of each class is held out to select the ridge."""


class RanPACConfig(FittedConfig):
    """Options of :class:`RanPAC`."""

    width: int | None = Field(
        None, ge=1, description="random features M; null: 16 times the features, at most 10,000 (16·M² bytes are kept)"
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
class RanPAC(StatisticalHead):
    """Random ReLU features and ridge regression; exact for a frozen backbone, outdated for one that moves.

    Every fifth image of each class, counted over all tasks, is held out to select the ridge: the sums of the images to
    fit and of those held out are kept apart, and the ridge with the least error on all held-out images so far is chosen
    at the end of each task. All images are then fitted with it. So the order in which classes are taught does not
    matter; the order of images of one class decides only which of them are held out.

    Paper: McDonnell et al., RanPAC: Random Projections and Pre-trained Models for Continual Learning, NeurIPS 2023,
    arXiv:2307.02251
    """

    name = "ranpac"
    Config = RanPACConfig
    config: RanPACConfig
    Module = RandomFeatures

    def reset(self) -> None:
        """No sums."""
        super().reset()
        self.sums: list[Tensor] = []
        """Gram and cross sums of the images to fit, and of those held out: [M, M], [M, K], [M, M], [M, K], float64."""
        self.ridge = RIDGES[0]

    @property
    def width(self) -> int:
        """Number M of random features."""
        return self.config.width or min(10_000, 16 * self.num_features)

    def projection(self) -> Tensor:
        """The fixed random weights, float32 [d, M]; they follow from the run's seed."""
        rng = torch.Generator().manual_seed(self.context.seed)
        return torch.randn(self.num_features, self.width, generator=rng).to(self.context.device)

    def add(self, rows: Iterable[FeatureBatch], task: TaskInfo) -> None:
        """Add images to the sums and to the statistics, and choose the ridge from the sums."""
        self.resize()
        fresh = self._empty()
        super().add(self._added(rows, fresh), task)
        # One at a time: no second copy of them all.
        fresh = [sum_over_processes([part])[0] for part in fresh]
        kept = [part.to(self.context.device) for part in self.sums] or self._empty()
        self.sums = [new.add_(old) for new, old in zip(fresh, kept, strict=True)]
        gram, cross, held_gram, held_cross = self.sums
        if held_gram.any():
            self.ridge = RIDGES[int(ridge_errors(gram, cross, held_gram, held_cross).argmin())]
        else:  # no class has five images: as large as the Gram matrix, since there is nothing to choose it by
            size = float(gram.diagonal().mean())
            self.ridge = min(RIDGES, key=lambda ridge: abs(ridge - size))

    def _empty(self) -> list[Tensor]:
        shapes = [(self.width, self.width), (self.width, self.num_classes)] * 2
        return [torch.zeros(shape, dtype=torch.float64, device=self.context.device) for shape in shapes]

    def _added(self, rows: Iterable[FeatureBatch], sums: list[Tensor]) -> Iterator[FeatureBatch]:
        """The rows, each of which is added to the sums on the way."""
        projection = self.projection()
        count = torch.zeros(self.num_classes, dtype=torch.int64)
        if self.statistics:
            count = self.statistics[0].count.long().cpu()
        planned = None
        if this_share().world > 1:  # which images are held out depends on the other processes' labels: one pass more
            planned = class_positions(torch.cat([row.y for row in rows]), count)
        for row in rows:
            if planned is None:
                positions = class_positions(row.y, count)
                count = count + row.y.cpu().bincount(minlength=self.num_classes)
            else:
                positions, planned = planned[: len(row.y)], planned[len(row.y) :]
            held = (positions % HELD_OUT == HELD_OUT - 1).to(projection.device)
            hidden, targets = self._hidden(row.new, projection), F.one_hot(row.y, self.num_classes).double()
            for part, start in ((~held, 0), (held, 2)):
                sums[start].addmm_(hidden[part].T, hidden[part])
                sums[start + 1].addmm_(hidden[part].T, targets[part])
            yield row

    def _hidden(self, features: Tensor, projection: Tensor) -> Tensor:
        """Random features of ``features: [b, d]``, computed in float32: float64 [b, M]."""
        return F.relu(features.to(projection) @ projection).double()

    def fit(self) -> RandomFeatures:
        """Ridge regression on all images, with a larger ridge if the Gram matrix is singular in float64."""
        gram, cross = self.sums[0] + self.sums[2], self.sums[1] + self.sums[3]
        found = (ridge_classifier(gram, cross, ridge) for ridge in RIDGES if ridge >= self.ridge)
        weight = next(weight for weight in found if weight is not None)
        offset = weight.new_zeros(len(weight)).masked_fill(~self.statistics[0].seen.to(weight.device), -torch.inf)
        return RandomFeatures(self.projection(), weight, offset)

    def resize(self) -> None:
        """Add classes without images if the statistics and sums have fewer classes than the head."""
        super().resize()
        if self.sums:
            more = self.num_classes - self.sums[1].shape[1]
            self.sums = [part if index % 2 == 0 else F.pad(part, (0, more)) for index, part in enumerate(self.sums)]

    def forget(self, label: int) -> None:  # noqa: ARG002 - no class can be
        """Refused: what one class added to the Gram matrix cannot be separated from what the others added."""
        raise ConfigError(
            "ranpac keeps one Gram matrix of the images of all classes, from which no class can be removed: use gda, "
            "lda or ncm to be able to forget classes, or teach a new model the other classes"
        )

    @torch.no_grad()
    def leaving_out(self, features: Tensor, labels: Tensor) -> RanPAC:
        """The head fitted, with the same ridge, to all images but these."""
        other = copy.copy(self)
        hidden = self._hidden(features, self.projection())
        targets = F.one_hot(labels.to(hidden.device), self.num_classes).double()
        other.sums = [*self.sums[:2], self.sums[2] - hidden.T @ hidden, self.sums[3] - hidden.T @ targets]
        found = StatisticalHead.leaving_out(other, features, labels)
        assert isinstance(found, RanPAC)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The statistics, the sums and the ridge so far."""
        return super().state_dict() | {"sums": list(self.sums), "ridge": self.ridge}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, also that of a head with fewer classes."""
        self.sums, self.ridge = [part.to(self.context.device) for part in state["sums"]], state["ridge"]
        super().load_state_dict(state)


def class_positions(labels: Tensor, before: Tensor) -> Tensor:
    """Position of each of this process's rows among all images of its class, of which ``before: [K]`` came earlier.

    ``labels: [n]``. Rows are dealt to the processes in turn, and counted in the order in which they were dealt.
    """
    share = this_share()
    dealt = share.number + share.world * torch.arange(len(labels))
    table = gather_rows(torch.stack([dealt, labels.cpu()], dim=1))
    dealt, labels = table[table[:, 0].argsort()].unbind(dim=1)
    by_class = labels.argsort(stable=True)
    counts = labels.bincount(minlength=len(before))
    positions = torch.empty_like(labels)
    positions[by_class] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]
    return (positions + before[labels])[dealt % share.world == share.number]


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
    """``(G + λI)⁻¹Q`` transposed, ``[K, M]``; ``None`` if G + λI is singular in float64.

    gram: [M, M], cross: [M, K].
    """
    factor, info = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return None if int(info) else torch.cholesky_solve(cross, factor).T


def squared_error(weight: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """``|HWᵀ - Y|²`` up to the constant ``|Y|²``, from ``gram = HᵀH: [M, M]`` and ``cross = HᵀY: [M, K]``."""
    return ((weight @ gram) * weight).sum() - 2 * (weight.T * cross).sum()
