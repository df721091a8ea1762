"""Frozen: learn features on the first task, then train the classifier alone. The baseline for holding features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from infssm.errors import ConfigError
from infssm.methods.bases.seq import Seq
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import BatchLike, Loader, TaskInfo, Terms, model_input
from infssm.methods.core.losses import data_loss
from infssm.methods.core.passes import evaluating
from infssm.models.features import features, output_layer
from infssm.ssm import unwrap


@register_method
class Frozen(Seq):
    """Trains all of the model on the first task and only its classifier on later ones: the features stay."""

    name = "frozen"
    online: ClassVar[bool] = False
    freezes: ClassVar[bool] = True

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """From the second task on, gradients for the classifier alone."""
        self._freeze(task)

    def loss(self, batch: BatchLike) -> Terms:
        """One term: the cross-entropy, or the squared error where targets are numbers."""
        task = self.context.current
        if task.index == 0:
            return super().loss(batch)
        module = unwrap(self.context.module)
        with evaluating(module):
            rows = features(module, model_input(batch))
        return data_loss(output_layer(module)(rows), batch, self.columns(task))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Freeze what was frozen when the state was saved."""
        if self.context.task is not None:
            self._freeze(self.context.task)

    def _freeze(self, task: TaskInfo) -> None:
        module = unwrap(self.context.module)
        if task.index > 0:
            module.requires_grad_(False)
            output_layer(module).requires_grad_(True)
            if shared := [name for name, p in module.named_parameters() if p.requires_grad and "embed" in name]:
                raise ConfigError(
                    f"frozen: the output layer shares its weights with {shared[0]}, so the features would move; create "
                    "the model with tie_embeddings=False"
                )
