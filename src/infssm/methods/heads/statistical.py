"""Heads fitted from class statistics: gathered once per task, and moved along with the model afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from infssm._processes import sum_over_processes
from infssm.methods.core.contract import ComponentConfig, Context, TaskInfo
from infssm.methods.core.head import FeatureBatch, Features, FittedHead
from infssm.methods.core.views import FittedConfig
from infssm.methods.heads.class_statistics import ClassStatistics, StatisticsSums
from infssm.methods.heads.gaussians import Gaussians, average_over_models, left_out_distances

Drift = Literal["map", "mean", "none"]


class MapDrift:
    """A ridge map from old to new features: ``f -> f @ (I + D) + b``.

    ``D = (XᵀX/n + λ·mean(diag(XᵀX/n))·I)⁻¹ Xᵀ(R - R̄)/n`` with X centred: without evidence nothing moves.
    """

    def __init__(self, width: int, ridge: float, device: torch.device | str = "cpu") -> None:
        self.ridge = ridge
        # Sums of [1, x]ᵀ[x, r]: everything the map follows from, whatever the number of images.
        self._sums = torch.zeros(width + 1, 2 * width, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, old: Tensor, new: Tensor) -> None:
        """Add features ``old: [b, d]`` and ``new: [b, d]`` of the same images."""
        x = old.double()
        both = torch.cat([x, new.double() - x], dim=1)
        self._sums.addmm_(torch.cat([torch.ones_like(x[:, :1]), x], dim=1).T, both)
        self._count += len(x)

    def solve(self) -> tuple[Tensor, Tensor]:
        """``matrix: [d, d]`` and ``shift: [d]`` of the map, over all processes."""
        sums, count = sum_over_processes([self._sums, self._count])
        width = sums.shape[1] // 2
        sums = sums / count
        mean_x, mean_r, second, cross = sums[0, :width], sums[0, width:], sums[1:, :width], sums[1:, width:]
        floor = 1e-12 * (1 + second.diagonal().mean())  # without variation nothing is known, and the map is a shift
        second = second - torch.outer(mean_x, mean_x)
        cross = cross - torch.outer(mean_x, mean_r)
        eye = torch.eye(width, dtype=torch.float64, device=sums.device)
        scale = torch.maximum(second.diagonal().mean(), floor)
        change = torch.linalg.solve(second + self.ridge * scale * eye, cross)
        return eye + change, mean_r - mean_x @ change


class MeanDrift:
    """Semantic drift compensation (Yu et al. 2020): each old mean moves with the images near it.

    ``μ_c += Σ_i w_i r_i / Σ_i w_i``, ``w_i = exp(-|x_i - μ_c|² / 2σ²)`` with σ² the trace of the pooled covariance.
    """

    def __init__(self, statistics: ClassStatistics) -> None:
        self._means = statistics.mean
        self._variance = statistics.pooled.trace().clamp(min=torch.finfo(torch.float64).tiny)
        self._weight = torch.zeros_like(statistics.count)
        self._motion = torch.zeros_like(statistics.mean)

    def add(self, old: Tensor, new: Tensor) -> None:
        """Add features ``old: [b, d]`` and ``new: [b, d]`` of the same images."""
        x = old.double()
        weight = torch.exp(-torch.cdist(self._means, x).square() / (2 * self._variance))
        self._weight += weight.sum(dim=1)
        self._motion += weight @ (new.double() - x)

    def solve(self) -> tuple[Tensor, Tensor]:
        """The identity, and the shift of each class, ``[K, d]``, over all processes: covariances stay."""
        weight, motion = sum_over_processes([self._weight, self._motion])
        # Where no image is near (weights underflow) the class stays.
        return torch.eye(motion.shape[1]).to(motion), motion / weight.clamp(min=1e-300)[:, None]


LARGE = 2**26
"""Elements of class covariances (256 MiB as float64 triangles) beyond which heads keep only the pooled one."""
_ALPHA = 0.001
"""Share of the identity in the covariance by which heads without a Gaussian of their own measure distances."""


class StatisticalConfig(FittedConfig):
    """Options of every head whose statistics follow the model."""

    drift: Drift = Field(
        "map",
        description="how statistics of old classes follow the model: 'map' (ridge map from old to new features of the "
        "task's images), 'mean' (SDC, Yu et al. 2020), 'none'",
    )
    ridge: float = Field(0.05, gt=0, description="of the drift map, as a share of the mean variance of the features")


class StatisticalHead(FittedHead):
    """Keeps statistics of every class, taken at the end of the tasks that have images of it and never again."""

    Config: ClassVar[type[ComponentConfig]] = StatisticalConfig
    config: FittedConfig
    statistics: list[ClassStatistics]
    """One entry per model whose features it uses; none before the first task."""
    task_of: list[int]
    """For every class which task brought it, among the tasks that brought any; -1 for classes without images."""
    drift_maps: list[tuple[Tensor, Tensor]]
    """By model how features of old classes moved in the last task: arguments of ``ClassStatistics.transformed_by``."""

    def __init__(self, config: Any, context: Context) -> None:
        super().__init__(config, context)
        self.needs_old = isinstance(config, StatisticalConfig) and config.drift != "none"

    def reset(self) -> None:
        """No statistics."""
        self.statistics, self.task_of, self.drift_maps = [], [], []
        self._gaussians: Gaussians | None = None

    def add(self, rows: Iterable[FeatureBatch], task: TaskInfo) -> None:  # noqa: ARG002 - labels say which classes
        """One pass over images: old statistics are first moved by the estimated drift, then merged with the new.

        Of every model whose features the head uses there are statistics of their own: they move each in its own way, or
        like the first task's not at all.
        """
        self.resize()
        kept = [statistics.to(self.context.device) for statistics in self.statistics]
        sums = self._sums()
        drifts: list[MapDrift | MeanDrift] = []
        if isinstance(self.config, StatisticalConfig) and isinstance(rows, Features) and rows.old is not None:
            if self.config.drift == "map":
                drifts = [MapDrift(one.mean.shape[1], self.config.ridge, self.context.device) for one in kept]
            elif self.config.drift == "mean":
                drifts = [MeanDrift(statistics) for statistics in kept]
        for row in rows:
            new = self.transformed(row.new.double()).chunk(self.num_parts, dim=1)
            for one, features in zip(sums, new, strict=True):
                one.add(features, row.y)
            if row.old is not None:
                old = self.transformed(row.old.double()).chunk(self.num_parts, dim=1)
                for model, drift in enumerate(drifts):
                    drift.add(old[model], new[model])
        self.drift_maps = [drift.solve() for drift in drifts]
        if drifts:
            kept = [
                statistics.transformed_by(*drift_map)
                for statistics, drift_map in zip(kept, self.drift_maps, strict=True)
            ]
        fresh = [one.statistics() for one in sums]
        self.statistics = self.joined(kept, fresh)
        number = max(self.task_of, default=-1) + 1
        seen = self.statistics[0].seen.tolist()
        known = self.task_of or [-1] * len(seen)
        self.task_of = [number if met and task < 0 else task for met, task in zip(seen, known, strict=True)]
        self._gaussians = None

    def joined(self, kept: list[ClassStatistics], fresh: list[ClassStatistics]) -> list[ClassStatistics]:
        """By model the statistics of earlier images, moved with the model, and of a task's images together."""
        return [old.merged(new) for old, new in zip(kept, fresh, strict=True)] if kept else fresh

    def _sums(self) -> list[StatisticsSums]:
        """Empty sums for every model."""
        width = self.num_features // self.num_parts
        return [
            StatisticsSums(
                self.num_classes,
                width,
                per_class=self.num_parts * self.num_classes * width**2 <= LARGE,
                device=self.context.device,
            )
            for _ in range(self.num_parts)
        ]

    def resize(self) -> None:
        """Add classes without images if the statistics have fewer classes than the head."""
        self.statistics = [statistics.resized(self.num_classes) for statistics in self.statistics]
        if self.statistics:
            self.task_of = [*self.task_of, *[-1] * (self.num_classes - len(self.task_of))]

    def forget(self, label: int) -> None:
        """Remove a class: the labels above move down by one, and the head is as if it had never been there."""
        self.statistics = [statistics.without(label) for statistics in self.statistics]
        remaining = [task for k, task in enumerate(self.task_of) if k != label]
        numbers = {task: number for number, task in enumerate(sorted(set(remaining) - {-1}))}
        self.task_of = [numbers.get(task, -1) for task in remaining]
        self.drift_maps, self._gaussians = [], None

    def gaussians(self) -> Gaussians:
        """The metric of the distances: here the covariance that all classes share."""
        if self._gaussians is None:
            alpha = getattr(self.config, "alpha", _ALPHA)
            found = average_over_models(self.statistics, alpha, beta=1)
            like = next(self.context.module.parameters())
            self._gaussians = found.to(like.device, torch.promote_types(like.dtype, torch.float32))
        return self._gaussians

    @torch.no_grad()
    def distances(self, features: Tensor) -> Tensor:
        """Squared Mahalanobis distances ``[b, K]``; ``inf`` for classes without images."""
        gaussians = self.gaussians()
        found = gaussians.distances(self.transformed(features.to(gaussians.mean)))
        return found.masked_fill(~self.statistics[0].seen.to(found.device), torch.inf)

    @torch.no_grad()
    def left_out_distances(self, features: Tensor, labels: Tensor) -> Tensor:
        """See :func:`~infssm.methods.heads.gaussians.left_out_distances`; of several models the mean."""
        alpha, beta = getattr(self.config, "alpha", _ALPHA), getattr(self.config, "beta", 1.0)
        parts = features.to(self.context.device).chunk(self.num_parts, dim=1)
        found = [
            left_out_distances(statistics, part, labels.to(part.device), alpha, beta)
            for statistics, part in zip(self.statistics, parts, strict=True)
        ]
        return torch.stack(found).mean(dim=0)

    @torch.no_grad()
    def leaving_out(self, features: Tensor, labels: Tensor) -> StatisticalHead:
        """The head fitted to all images but these: their statistics are removed from those of all images."""
        other = copy.copy(self)
        pairs = zip(self.statistics, self.statistics_of(features, labels), strict=True)
        other.statistics = [one.to(self.context.device).removed(images) for one, images in pairs]
        other._gaussians = None
        other._fit()
        return other

    def statistics_of(self, features: Tensor, labels: Tensor) -> list[ClassStatistics]:
        """By model the statistics of transformed ``features: [m, d]`` with ``labels: [m]``, of this process only."""
        sums, device = self._sums(), self.context.device
        for one, part in zip(sums, features.double().to(device).chunk(self.num_parts, dim=1), strict=True):
            one.add(part, labels.to(device))
        return [one.statistics(list) for one in sums]

    def moved(self, features: Tensor, labels: Tensor) -> Tensor:
        """Features ``[m, d]`` of earlier images with ``labels: [m]`` where the last task moved them, as estimated."""
        if not self.drift_maps:
            return features
        found = []
        for part, (matrix, shift) in zip(features.chunk(self.num_parts, dim=1), self.drift_maps, strict=True):
            found.append(part @ matrix.to(part) + (shift if shift.ndim == 1 else shift[labels]).to(part))
        return torch.cat(found, dim=1).to(features)

    def state_dict(self) -> dict[str, Any]:
        """The statistics so far, by model, and which classes came together."""
        found = {str(model): statistics.state_dict() for model, statistics in enumerate(self.statistics)}
        return super().state_dict() | {"statistics": found, "task_of": list(self.task_of)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, also that of a head with fewer classes."""
        super().load_state_dict(state)
        device = self.context.device
        self.statistics = [ClassStatistics.of(statistics).to(device) for statistics in state["statistics"].values()]
        self.task_of, self.drift_maps, self._gaussians = list(state["task_of"]), [], None
        self.resize()
