"""SI: parameters that contributed to the fall of the loss stay where the last task left them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from infssm._processes import sum_over_processes, this_share
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, Context, Loader, TaskInfo
from infssm.methods.regularizers.quadratic import QuadraticConfig, QuadraticRegularizer, quadratic

logger = logging.getLogger(__name__)


class SIConfig(QuadraticConfig):
    """Options of :class:`SI`."""

    weight: float = Field(1e3, ge=0, description="c; the paper uses 1e3 to 1e5 (Tables 12-13)")
    xi: float = Field(0.9, gt=0, description="ξ: damps small movements (paper: 0.8 and 0.9)")
    clamp_omega: bool = Field(
        True, description="cut negative importances to 0; left negative they push parameters away from θ*"
    )


@register_method
class SI(QuadraticRegularizer):
    """Synaptic intelligence: weights whose changes lowered the loss on old tasks are hard to move.

    ``c Σ Ω (θ - θ*)²`` with ``Ω ← Ω + ω / ((θ - θ*)² + ξ)`` and ``ω ← ω + g · (θ_before - θ_after)`` per step.
    ``g`` is the gradient of the loss without this penalty. Other regularizers of a composed method count as loss.

    Paper: Zenke, Poole and Ganguli, Continual Learning Through Synaptic Intelligence, ICML 2017, arXiv:1703.04200
    """

    name = "si"
    supported_data = ALL_DATA
    Config = SIConfig
    own_first_task = True
    config: SIConfig
    saved = (*QuadraticRegularizer.saved, "omega")

    def __init__(self, config: SIConfig, context: Context) -> None:
        super().__init__(config, context)
        self.omega = self.parameters.zeros()
        self.negative = 0
        """How many importances were negative at the end of the last task, before clamping."""
        self._before: dict[str, Tensor] = {}
        self._gradient: dict[str, Tensor] = {}
        self._penalty_gradient: dict[str, Tensor] = {}
        for name, parameter in self.parameters.parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self.capture, name))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def capture(self, name: str, parameter: Tensor) -> None:
        """Note gradient and value of a parameter; the loop may clear gradients before ``after_step``."""
        assert parameter.grad is not None
        self._gradient[name] = parameter.grad.detach().clone()
        self._before[name] = parameter.detach().clone()

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Start from θ* = the model as it is and Ω = 0, unless a task has ended before."""
        super().begin_task(task, loader)
        if self.anchor is None or self.importance is None:
            self.anchor, self.importance = self.parameters.clone(), self.parameters.zeros()

    def squared_distance(self) -> Tensor:
        """``Σ Ω (θ - θ*)²``; notes what its own gradient adds to each parameter's."""
        assert self.importance is not None
        assert self.anchor is not None
        shadows = {name: parameter.view_as(parameter) for name, parameter in self.parameters.parameters.items()}
        for name, shadow in shadows.items():
            if shadow.requires_grad:
                shadow.register_hook(partial(self._note_penalty, name))  # type: ignore[no-untyped-call]
        return quadratic(self.parameters.take(shadows), self.importance, self.anchor)

    def _note_penalty(self, name: str, gradient: Tensor) -> None:
        known = self._penalty_gradient.get(name)
        self._penalty_gradient[name] = gradient.detach() if known is None else known + gradient.detach()

    def after_step(self) -> None:
        """Add the step's share of the path integral."""
        gradients = {
            name: gradient - self._penalty_gradient[name] if name in self._penalty_gradient else gradient
            for name, gradient in self._gradient.items()
        }
        # Gradients were noted before the processes averaged theirs.
        means = [total / this_share().world for total in sum_over_processes(list(gradients.values()))]
        parameters = self.parameters.parameters
        moved = {
            name: mean * (self._before[name] - parameters[name].detach())
            for name, mean in zip(gradients, means, strict=True)
        }
        self.omega = self.omega | {key: self.omega[key] + step for key, step in self.parameters.take(moved).items()}
        self._before, self._gradient, self._penalty_gradient = {}, {}, {}

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Turn the path integral into importances, and hold the parameters where they are now."""
        values = self.parameters.clone()
        start = self.anchor or values
        new = {key: w / ((values[key] - start[key]).square() + self.config.xi) for key, w in self.omega.items()}
        total = {key: self.importance[key] + value for key, value in new.items()} if self.importance else new
        self.negative = sum(int((value < 0).sum()) for value in total.values())
        logger.info("si: %d of %d importances are negative", self.negative, sum(v.numel() for v in total.values()))
        self.importance = {k: v.clamp_min(0) for k, v in total.items()} if self.config.clamp_omega else total
        self.anchor, self.omega = values, self.parameters.zeros()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore importances, anchors and the running path integral."""
        super().load_state_dict(state)
        self._before, self._gradient, self._penalty_gradient = {}, {}, {}
