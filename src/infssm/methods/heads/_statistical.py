"""The part that heads on class statistics share: gather them once per task, and move those of old classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from infssm.methods.contract import ComponentConfig, Context
from infssm.methods.head import Features, FittedHead
from infssm.methods.heads._drift import Drift, MapDrift, MeanDrift
from infssm.methods.heads._statistics import ClassStatistics, StatisticsSums

LARGE = 2**26
"""Elements of class covariances (256 MiB in float32) beyond which heads keep the pooled one alone."""


class StatisticalConfig(ComponentConfig):
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
        self.statistics: ClassStatistics | None = None

    def transformed(self, features: Tensor) -> Tensor:
        """What statistics are taken of: ``features: [b, d]`` themselves unless a head says otherwise."""
        return features

    def gather(self, rows: Features) -> ClassStatistics:
        """One pass over the task's images: statistics of its classes, and of the old ones where they are now."""
        per_class = self.per_class and self.num_classes * self.num_features**2 <= LARGE
        device = self.context.device
        sums = StatisticsSums(self.num_classes, self.num_features, per_class=per_class, device=device)
        kept = None if self.statistics is None else self.statistics.to(device)
        drift = self._drift(kept) if kept is not None else None
        for row in rows:
            new = self.transformed(row.new.double())
            sums.add(new, row.y)
            if drift is not None and row.old is not None:
                drift.add(self.transformed(row.old.double()), new)
        fresh = sums.statistics()
        if kept is not None:
            fresh = (kept if drift is None else drift.moved(kept)).replaced(fresh)
        self.statistics = fresh
        return fresh

    def _drift(self, kept: ClassStatistics) -> MapDrift | MeanDrift | None:
        if self.config.drift == "map":
            return MapDrift(self.num_features, self.config.ridge, self.context.device)
        return MeanDrift(kept) if self.config.drift == "mean" else None

    def state_dict(self) -> dict[str, Any]:
        """The statistics so far."""
        return {"statistics": None if self.statistics is None else self.statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        found = state["statistics"]
        self.statistics = None if found is None else ClassStatistics.from_state_dict(found)


class GaussianConfig(StatisticalConfig):
    """Options of every head that compares likelihoods of classes."""

    prior: Literal["class", "task"] = Field(
        "class",
        description="what is equally likely before an image is seen: every 'class', or every 'task', so that a class "
        "of a small task counts for more than one of a large base; AA, a mean over tasks, asks for 'task'",
    )


class GaussianHead(StatisticalHead):
    """Classes compared by the likelihood of a feature and what is known before."""

    Config: ClassVar[type[ComponentConfig]] = GaussianConfig
    config: GaussianConfig

    def reset(self) -> None:
        """No statistics, no tasks."""
        super().reset()
        self.siblings: Tensor | None = None
        """Of every class, how many classes the task has that brought it: [K]; 0 where it was not met yet."""

    def gather(self, rows: Features) -> ClassStatistics:
        """Statistics of all classes met, of which the new ones are siblings."""
        found = super().gather(rows)
        known = torch.zeros_like(found.count) if self.siblings is None else self.siblings.to(found.count.device)
        new = found.seen & (known == 0)
        self.siblings = torch.where(new, new.sum().double(), known)
        return found

    def log_prior(self) -> Tensor:
        """Of every class, up to a number that is the same for all: [K]."""
        assert self.siblings is not None
        return torch.zeros_like(self.siblings) if self.config.prior == "class" else -self.siblings.clamp(min=1).log()

    def state_dict(self) -> dict[str, Any]:
        """The statistics so far, and which classes came together."""
        return super().state_dict() | {"siblings": self.siblings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        super().load_state_dict(state)
        self.siblings = state["siblings"]
