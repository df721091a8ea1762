"""`AutoWeighted`: a penalty that pulls with a set share of the loss's strength.

The rule: ``weight = SHARE · |∇loss| / |∇penalty|``, the lengths taken over the parameters that the penalty reaches,
root mean squares of all measurements of the task so far. By Cauchy and Schwarz a step along both gradients still goes
down the loss, by at least ``1 - SHARE`` of what the loss's gradient alone would give, as long as the loss pulls as it
did on average: whatever the model, the data, the distance and the learning rate, the penalty cannot keep a task from
being learned. Once it is, and the loss pulls less, the penalty may bring the states back. Between measurements the
penalty may grow; then the weight falls with its square root, because near its minimum a penalty's gradient grows so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infssm._processes import sum_over_processes, this_share
from infssm.errors import ConfigError
from infssm.methods.core.contract import Context, Loader, Regularizer, TaskInfo

SHARE = 0.2
"""Small enough to do no harm in any regime we measured; at 0.3 a language model's new domain was 3 % worse."""


_COMPILED = (
    "weight='auto' measures with a backward pass of its own, for which torch.compile has not kept the tensors: set "
    "torch._functorch.config.donated_buffer = False before the compiled model first runs, or weight to a number"
)


class AutoWeighted(Regularizer):
    """A regularizer of one penalty, whose option ``weight`` is a number or 'auto'.

    With 'auto' both gradients are measured at step ``measure_at`` of a task, and whenever the steps have doubled since.
    Until the first measurement of a task the weight is the last task's, on the first of all 0. A step's gradients are
    those of all its batches on all processes. No random numbers are drawn, and the step that is measured is like any
    other.
    """

    saved = ("weight", "level", "task", "steps", "sums")

    def __init__(self, config: Any, context: Context) -> None:
        super().__init__(config, context)
        self.auto = config.weight == "auto"
        self.weight = 0.0 if self.auto else float(config.weight)
        self.level = 0.0  # the penalty at the measurements
        self.task = 0
        self.steps = 0
        self.sums = [0.0] * 4
        self._step: _Step | None = None

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Measure anew, when the model has moved away from the new old model, where the penalty has no gradient.

        A task that is begun again, as after a checkpoint in its middle, has the old model it had.
        """
        if task.index != self.task:
            self.task, self.steps, self.sums = task.index, 0, [0.0] * 4

    def weigh(self, penalty: Tensor) -> Tensor:
        """The weighted penalty, to be added to the loss."""
        if not self.auto:
            return self.weight * penalty
        (value,) = sum_over_processes([penalty.detach()])
        grown = self.level / (value / this_share().world).clamp(min=torch.finfo(value.dtype).tiny)
        weight = self.weight * grown.clamp(max=1).sqrt()
        weighted = weight * penalty
        times, rest = divmod(self.steps + 1, self.config.measure_at)
        if rest == 0 and times.bit_count() == 1 and penalty.requires_grad:
            if self._step is None:
                self._step = _Step([p for p in self.context.module.parameters() if p.requires_grad])
            self._step.add(penalty, weight, weighted)
        return weighted

    def after_step(self) -> None:
        """Set the weight, where the step was measured."""
        self.steps += 1
        if self._step is None:
            return
        gradients, value = sum_over_processes(self._step.end())
        self._step = None
        dtype = torch.promote_types(gradients.dtype, torch.float32)
        lengths = torch.linalg.vector_norm(gradients / this_share().world, dim=1, dtype=dtype)
        found = [float(lengths[0]) ** 2, float(lengths[1]) ** 2, float(value) / this_share().world, 1.0]
        if found[1] > 0 and all(map(math.isfinite, found)):  # at the old model itself there is nothing to hold yet
            loss, own, level, count = self.sums = [a + b for a, b in zip(self.sums, found, strict=True)]
            self.weight, self.level = SHARE * math.sqrt(loss / own), level / count

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Warn if a whole task was too short to be measured, so that nothing was held in it."""
        first = self.config.measure_at
        if self.auto and task.index > 0 and 0 < self.steps < first and not self.weight:
            warnings.warn(
                f"weight='auto' held nothing: it measures at step {first} of a task, and this one had "
                f"{self.steps}; set measure_at to a lower number",
                stacklevel=2,
            )

    def automatic_options(self) -> dict[str, float]:
        """The measured weight, once there is one."""
        return {"weight": self.weight} if self.auto and self.weight else {}

    def state_dict(self) -> dict[str, Any]:
        """The measured weight, and what the next one follows from."""
        return super().state_dict() if self.auto else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the measured weight."""
        if self.auto:
            super().load_state_dict(state)


class _Step:
    """Gradients of one optimizer step, added up over its batches: the penalty's own, and the loss's."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._own, self._held, self._total = ([torch.zeros_like(p) for p in parameters] for _ in range(3))
        self._reached = [False] * len(parameters)
        self._values: list[Tensor] = []
        self._scale = torch.ones(())
        self._hooks = [p.register_hook(partial(self._add_total, i)) for i, p in enumerate(parameters)]  # type: ignore[no-untyped-call]
        self._own_backward = False

    def add(self, penalty: Tensor, weight: Tensor, weighted: Tensor) -> None:
        """The gradient of ``penalty``; ``weighted`` is what goes into the loss of it."""
        self._own_backward = True  # hooks see this one too
        try:
            found = torch.autograd.grad(penalty, self._parameters, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "donated" not in str(error):
                raise
            raise ConfigError(_COMPILED) from None
        finally:
            self._own_backward = False
        for index, part in enumerate(found):
            if part is not None:
                self._own[index] += part
                self._held[index] += weight * part
                self._reached[index] = True
        self._values.append(penalty.detach())
        weighted.register_hook(self._set_scale)  # type: ignore[no-untyped-call]

    def _set_scale(self, scale: Tensor) -> None:
        """Note what the loop multiplies the sum of loss and penalty with: gradient accumulation, loss scaling."""
        self._scale = scale

    def _add_total(self, index: int, gradient: Tensor) -> None:
        if not self._own_backward:
            self._total[index] += gradient

    def end(self) -> list[Tensor]:
        """Gradients of loss and penalty ``[2, n]``, over the parameters that the penalty reaches; its mean value."""
        for hook in self._hooks:
            hook.remove()
        kept = [index for index, reached in enumerate(self._reached) if reached]
        loss = [(self._total[i] / self._scale - self._held[i]).flatten() for i in kept]
        own = [self._own[i].flatten() for i in kept]
        return [torch.stack([torch.cat(loss), torch.cat(own)]), torch.stack(self._values).mean()]
