"""MAS: parameters to which the outputs are sensitive stay where the last task left them. Needs no labels."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from infssm._batch import run_model
from infssm._processes import sum_over_processes
from infssm.errors import ConfigError
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, Loader, TaskInfo, model_input
from infssm.methods.core.passes import evaluating
from infssm.methods.regularizers.quadratic import MeasuredRegularizer, QuadraticConfig, Values
from infssm.ssm import logits_of


class MASConfig(QuadraticConfig):
    """Options of :class:`MAS`."""

    weight: float = Field(10.0, ge=0, description="λ; the paper uses 10 and 100 (Tables 12-13)")


@register_method
class MAS(MeasuredRegularizer):
    """Memory aware synapses: weights that the outputs depend on strongly are hard to move. Needs no labels.

    ``λ Σ Ω (θ - θ*)²`` with ``Ω ← Ω + (1/N) Σ_batches |∂ Σ_x ‖f(x)‖² / ∂θ|`` after each task.

    Paper: Aljundi et al., Memory Aware Synapses: Learning what (not) to forget, ECCV 2018, arXiv:1711.09601
    """

    name = "mas"
    supported_data: ClassVar[frozenset[str]] = ALL_DATA - {"language"}
    Config = MASConfig
    config: MASConfig

    def measure(self, task: TaskInfo, loader: Loader) -> Values:
        """Mean absolute gradient of the squared norm of the logits of all seen classes.

        The absolute value is taken per batch, as the original implementation does; N counts samples.
        """
        totals, count = self.parameters.zeros(), 0
        with evaluating(self.context.module, gradients=True) as module:
            for batch in loader:
                x = model_input(batch, self.context.device)
                logits = logits_of(run_model(module, x))[:, task.seen]
                gradients = self.parameters.gradients(logits.square().sum())
                # Summed before the absolute value, so that processes that share a batch measure what one would.
                for key, gradient in zip(gradients, sum_over_processes(list(gradients.values())), strict=True):
                    totals[key] += gradient.abs()
                count += len(logits)
        (number,) = sum_over_processes([torch.tensor([float(count)]).to(self.context.device)])
        if not number:
            raise ConfigError("mas: the loader given to end_task gave no batch; pass one that can be iterated again")
        return {key: value / number for key, value in totals.items()}
