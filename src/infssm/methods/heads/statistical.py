"""Heads fitted from class statistics: gathered once per task, and moved along with the model afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from infssm.methods.core.contract import ComponentConfig, Context
from infssm.methods.core.head import Features, FittedHead
from infssm.methods.core.views import FittedConfig
from infssm.methods.heads.class_statistics import ClassStatistics, StatisticsSums
from infssm.methods.heads.drift import Drift, MapDrift, MeanDrift

LARGE = 2**26
"""Elements of class covariances (256 MiB in float32) beyond which heads keep the pooled one alone."""


class StatisticalConfig(FittedConfig):
    """Options of every head on class statistics."""

    drift: Drift = Field(
        "map",
        description="how statistics of old classes follow the model: 'map' (ridge map from old to new features of the "
        "task's images), 'mean' (SDC, Yu et al. 2020), 'none'",
    )
    ridge: float = Field(0.05, gt=0, description="of the drift map, as a share of the mean variance of the features")


class StatisticalHead(FittedHead):
    """Fitted from statistics of every class, which are gathered at the end of the class's task and never again."""

    Config: ClassVar[type[ComponentConfig]] = StatisticalConfig
    config: StatisticalConfig
    per_class: ClassVar[bool] = False
    """Whether a covariance of each class is used, where their memory allows."""

    def __init__(self, config: Any, context: Context) -> None:
        super().__init__(config, context)
        self.needs_old = self.config.drift != "none"

    def reset(self) -> None:
        """No statistics."""
        self.statistics: list[ClassStatistics] = []
        """One entry per model whose features it uses."""

    def transformed(self, features: Tensor) -> Tensor:
        """The quantity whose statistics are taken; by default ``features: [b, d]`` themselves."""
        return features

    def gather(self, rows: Features) -> list[ClassStatistics]:
        """One pass over the task's images: statistics of its classes, and of the old ones where they are now.

        One for every model whose features the head uses: they move each in its own way, or like the first task's not
        at all.
        """
        device, models, width = self.context.device, self.num_models, self.num_features // self.num_models
        per_class = self.per_class and models * self.num_classes * width**2 <= LARGE
        sums = [StatisticsSums(self.num_classes, width, per_class=per_class, device=device) for _ in range(models)]
        kept = [statistics.to(device) for statistics in self.statistics]
        drifts: list[MapDrift | MeanDrift] = []
        if self.config.drift == "map":
            drifts = [MapDrift(width, self.config.ridge, device) for _ in kept]
        elif self.config.drift == "mean":
            drifts = [MeanDrift(statistics) for statistics in kept]
        for row in rows:
            new = self.transformed(row.new.double()).chunk(models, dim=1)
            for model in range(models):
                sums[model].add(new[model], row.y)
            if row.old is not None:
                old = self.transformed(row.old.double()).chunk(models, dim=1)
                for model, drift in enumerate(drifts):
                    drift.add(old[model], new[model])
        moved = [drift.moved(statistics) for drift, statistics in zip(drifts, kept, strict=True)] if drifts else kept
        fresh = [one.statistics() for one in sums]
        if moved:
            fresh = [statistics.replaced(new_ones) for statistics, new_ones in zip(moved, fresh, strict=True)]
        self.statistics = fresh
        return self.statistics

    def state_dict(self) -> dict[str, Any]:
        """The statistics so far, by model."""
        found = {str(model): statistics.state_dict() for model, statistics in enumerate(self.statistics)}
        return super().state_dict() | {"statistics": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        super().load_state_dict(state)
        self.statistics = [ClassStatistics(**statistics) for statistics in state["statistics"].values()]


class GaussianConfig(StatisticalConfig):
    """Options of every head that compares likelihoods of classes."""

    prior: Literal["class", "task"] = Field(
        "class",
        description="what is equally likely before an image is seen: every 'class', or every 'task', so that a class "
        "of a small task counts for more than one of a large base; AA, a mean over tasks, asks for 'task'",
    )


class GaussianHead(StatisticalHead):
    """Classes are compared by the likelihood of a feature times a prior."""

    Config: ClassVar[type[ComponentConfig]] = GaussianConfig
    config: GaussianConfig

    def reset(self) -> None:
        """No statistics, no tasks."""
        super().reset()
        self.siblings: Tensor | None = None
        """For every class the number of classes of the task that brought it: [K]; 0 for classes not met yet."""

    def gather(self, rows: Features) -> list[ClassStatistics]:
        """Statistics of all classes met; the new ones are noted as classes of one task."""
        found = super().gather(rows)
        count, seen = found[0].count, found[0].seen
        known = torch.zeros_like(count) if self.siblings is None else self.siblings.to(count.device)
        new = seen & (known == 0)
        self.siblings = torch.where(new, new.sum().double(), known)
        return found

    def log_prior(self) -> Tensor:
        """Log prior of every class, up to a constant that is the same for all: [K]."""
        assert self.siblings is not None
        return torch.zeros_like(self.siblings) if self.config.prior == "class" else -self.siblings.clamp(min=1).log()

    def state_dict(self) -> dict[str, Any]:
        """The statistics so far, and the number of classes of each class's task."""
        return super().state_dict() | {"siblings": self.siblings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        super().load_state_dict(state)
        self.siblings = state["siblings"]
