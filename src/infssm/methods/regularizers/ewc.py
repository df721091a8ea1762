"""EWC (online) and MAS: a quadratic penalty whose importances are measured when a task ends."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from infssm._batch import run_model
from infssm._processes import sum_over_processes
from infssm.errors import ConfigError
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, Loader, TaskInfo, model_input
from infssm.methods.core.passes import evaluating, samples
from infssm.methods.regularizers.quadratic import MeasuredRegularizer, QuadraticConfig, Values, sum_dtype
from infssm.ssm import logits_of


class EWCConfig(QuadraticConfig):
    """Options of :class:`EWC`."""

    weight: float = Field(200.0, ge=0, description="λ; the paper uses 200 to 1e4 (Tables 12-13)")
    gamma: float = Field(0.75, ge=0, le=1, description="γ: share of the old Fisher kept (paper: 0.75)")
    label_weight: Literal["probability", "one"] = Field(
        "probability",
        description="weight of each squared gradient: p(y|x), as Mammoth; or 1, the empirical Fisher",
    )
    fisher_samples: int | None = Field(
        None, gt=0, description="samples per task for the Fisher, spread over the loader's batches; null: all"
    )


@register_method
class EWC(MeasuredRegularizer):
    """Elastic weight consolidation: weights that mattered for old tasks (Fisher information) are hard to move.

    ``λ Σ F (θ - θ*)²`` with ``F ← γ F + mean_x w (∂ log p(y|x) / ∂θ)²`` after each task. Of regression the Fisher
    information of a Gaussian of variance 1, ``mean_x (∂ f(x) / ∂θ)²``, which needs no targets.

    Paper: Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks, PNAS 2017, arXiv:1612.00796; the
    running sum: Schwarz et al., Progress & Compress, ICML 2018, arXiv:1805.06370
    """

    name = "ewc"
    supported_data = ALL_DATA - {"language"}
    Config = EWCConfig
    config: EWCConfig
    importances = "Fisher"

    @property
    def decay(self) -> float:
        """The option ``gamma``."""
        return self.config.gamma

    def measure(self, task: TaskInfo, loader: Loader) -> Values:
        """Mean over samples of the weighted squared gradient of ``log p(y|x)``.

        The softmax runs over the classes that the base trains it over. One sample at a time: the square of a batch's
        mean gradient is a different, much smaller quantity.
        """
        totals, count, columns = self.parameters.zeros(), 0, self.context.columns(task)
        with evaluating(self.context.module, gradients=True) as module:
            for x, y in samples(loader, self.config.fisher_samples, self.context.device):
                logits = logits_of(module(x))[:, columns]
                if y.is_floating_point():  # a Gaussian's expected squared gradient is that of its mean
                    log_p, weight = logits[0, 0], torch.ones(())
                else:
                    log_p = -F.cross_entropy(logits.to(sum_dtype(logits.dtype)), y - (columns.start or 0))
                    probability = self.config.label_weight == "probability"
                    weight = log_p.detach().exp() if probability else torch.ones(())
                for key, gradient in self.parameters.gradients(log_p).items():
                    totals[key] += weight.to(gradient.device) * gradient.square()
                count += 1
        *sums, number = sum_over_processes([*totals.values(), torch.tensor([float(count)]).to(self.context.device)])
        if not number:
            raise ConfigError("ewc: the loader given to end_task gave no sample; pass one that can be iterated again")
        return {key: value / number for key, value in zip(totals, sums, strict=True)}


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
    supported_data = ALL_DATA - {"language"}
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
