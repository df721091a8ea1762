"""What ewc, si and mas share: importances, the values they hold the parameters to, and the quadratic penalty."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from infssm.errors import ConfigError
from infssm.methods.core.contract import ComponentConfig, Context, Loader, ModelPair, Regularizer, TaskInfo, Terms
from infssm.methods.core.passes import require_loader
from infssm.methods.regularizers.parameters import ParameterSet, Values, Which


class QuadraticConfig(ComponentConfig):
    """Options of every method with a quadratic penalty on parameters."""

    weight: float = Field(1.0, ge=0, description="factor on Σ importance · (θ - θ*)²")
    params: Which = Field(
        "ABC-direct",
        description="parameters held: those that form (A, C), (A, B, C), or also what feeds them (paper: (A, B, C))",
    )


class QuadraticRegularizer(Regularizer):
    """``weight · Σ importance · (θ - θ*)²`` with θ* the parameters at the end of the last task."""

    Config: ClassVar[type[ComponentConfig]] = QuadraticConfig
    config: QuadraticConfig

    def __init__(self, config: QuadraticConfig, context: Context) -> None:
        super().__init__(config, context)
        self.parameters = ParameterSet(context.module, config.params, layers=context.layers)
        self.importance: Values | None = None
        self.anchor: Values | None = None

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Follow the model to its device."""
        if self.importance is not None:
            self.importance = self.parameters.to_device(self.importance)
        if self.anchor is not None:
            self.anchor = self.parameters.to_device(self.anchor)

    def penalty(self, pair: ModelPair) -> Terms:  # noqa: ARG002
        """The term ``penalty``."""
        return {"penalty": self.config.weight * self.squared_distance()}

    def squared_distance(self) -> Tensor:
        """``Σ importance · (θ - θ*)²``, a scalar."""
        assert self.importance is not None
        assert self.anchor is not None
        return self.parameters.squared_distance(self.importance, self.anchor)

    def state_dict(self) -> dict[str, Any]:
        """Importances and anchors."""
        return {"importance": _copy(self.importance), "anchor": _copy(self.anchor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore importances and anchors."""
        importance, anchor = state["importance"], state["anchor"]
        self.importance = None if importance is None else self.parameters.to_device(importance)
        self.anchor = None if anchor is None else self.parameters.to_device(anchor)


class MeasuredRegularizer(QuadraticRegularizer):
    """A quadratic penalty whose importances are measured on a task's data when it ends."""

    needs_loader: ClassVar[bool] = True
    importances: ClassVar[str] = "importances"
    """Name of the measured values in error messages."""

    @property
    def decay(self) -> float:
        """Factor on the importances of earlier tasks when those of another join them."""
        return 1.0

    @abstractmethod
    def measure(self, task: TaskInfo, loader: Loader) -> Values:
        """Importances of the parameters for a task."""

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Check that importances of earlier tasks were measured."""
        super().begin_task(task, loader)
        if task.index > 0 and self.importance is None:
            raise ConfigError(
                f"{self.name} has no {self.importances} of the past: call method.end_task(task, loader) of the task "
                "before first"
            )

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Add this task's importances to the old ones, and hold the parameters where they are now."""
        loader = require_loader(loader, self.name, "measures importances on the task's data")
        new, old = self.measure(task, loader), self.importance
        self.importance = new if old is None else {key: self.decay * old[key] + new[key] for key in new}
        self.anchor = self.parameters.clone()


def _copy(values: Values | None) -> Values | None:
    """A dictionary of its own; the tensors are replaced, never written to."""
    return None if values is None else dict(values)
