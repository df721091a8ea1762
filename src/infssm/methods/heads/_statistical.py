"""The part that heads on class statistics share: gather them once per task, and move those of old classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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
