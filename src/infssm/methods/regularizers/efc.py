"""EFC: features stay where the classifier depends on them, and may move where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from infssm._batch import model_input
from infssm._processes import sum_over_processes
from infssm.errors import ConfigError
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import (
    LABELLED_DATA,
    Context,
    Loader,
    ModelPair,
    PairConfig,
    Regularizer,
    TaskInfo,
    Terms,
)
from infssm.methods.core.passes import evaluating, require_loader
from infssm.models.features import features, find_classifier
from infssm.ssm import unwrap


class EFCConfig(PairConfig):
    """Options of :class:`EFC`."""

    weight: float = Field(10.0, ge=0, description="λ: on the distance by the empirical feature matrix (paper: 10)")
    damping: float = Field(0.1, ge=0, description="η: on the squared distance in all directions (paper: 0.1)")


@register_method
class EFC(Regularizer):
    """Elastic feature consolidation: on new data, features keep what the classifier of the old classes reads in them.

    ``mean (f - f_old)ᵀ (λE + ηI) (f - f_old)`` with the empirical feature matrix of the last task, ``E = mean_x Jᵀ
    (diag(p) - ppᵀ) J``, over the softmax p of all classes met so far. J is the derivative of the logits by the
    features; of a linear classifier its weights. With ``weight=0`` it is ``lwf-f``, summed over features.

    Paper: Magistri et al., Elastic Feature Consolidation for Cold Start Exemplar-Free Incremental Learning, ICLR 2024,
    arXiv:2402.03917
    """

    name = "efc"
    Config = EFCConfig
    config: EFCConfig
    supported_data = LABELLED_DATA
    needs_features = True
    needs_loader = True
    saved = ("matrix",)

    def __init__(self, config: EFCConfig, context: Context) -> None:
        super().__init__(config, context)
        self.matrix: Tensor | None = None
        """The empirical feature matrix E of the last task: float64 ``[d, d]``."""

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Check that the matrix of the last task was measured."""
        if task.index > 0 and self.matrix is None:
            raise ConfigError(
                f"{self.name} has no feature matrix of old tasks: call method.end_task(task, loader) for the last one"
            )

    def penalty(self, pair: ModelPair) -> Terms:
        """The term ``features``."""
        old, new, matrix = pair.old.features, pair.new.features, self.matrix
        assert old is not None
        assert new is not None
        assert matrix is not None
        moved = new - old
        by_matrix = ((moved @ matrix.to(moved)) * moved).sum(dim=1)
        weighted = self.config.weight * by_matrix + self.config.damping * moved.square().sum(dim=1)
        return {"features": weighted.mean()}

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Replace the matrix by that of this task's data; earlier ones are not kept, as in the paper."""
        loader = require_loader(loader, self.name, "measures the empirical feature matrix on the task's data")
        device, count = self.context.device, 0
        with evaluating(unwrap(self.context.module)) as module:
            width = find_classifier(module).in_features
            total = torch.zeros(width, width, dtype=torch.float64, device=device)
            for batch in loader:
                rows = features(module, model_input(batch, device))
                total += feature_matrix(find_classifier(module).module, rows, task.seen)
                count += len(rows)
        total, number = sum_over_processes([total, total.new_tensor([count])])
        if not number:
            raise ConfigError("efc: the loader given to end_task gave no sample; pass one that can be iterated again")
        self.matrix = total / number

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the matrix of the last task."""
        super().load_state_dict({"matrix": None, **state})
        self.matrix = None if self.matrix is None else self.matrix.to(self.context.device)


@torch.enable_grad()
def feature_matrix(classifier: torch.nn.Module, rows: Tensor, columns: slice) -> Tensor:
    """``Σ_i Σ_c p_ic g_ic g_icᵀ`` over ``rows: [b, d]``, g the gradient of log p by the features: float64 ``[d, d]``.

    The softmax runs over some ``columns`` of the logits. One backward pass through the classifier for each class, so
    that any classifier will do; beside the forward passes of the model it costs next to nothing.
    """
    rows = rows.detach().requires_grad_()
    log_p = classifier(rows)[:, columns].double().log_softmax(dim=1)
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for column in log_p.unbind(dim=1):
        (gradient,) = torch.autograd.grad(column.sum(), rows, retain_graph=True)
        gradient = gradient.double()
        total.addmm_(gradient.T, column.detach().exp()[:, None] * gradient)
    return total
