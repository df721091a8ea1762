"""Frozen: learn features on the first task, then train only the classifier. The baseline for holding features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infssm.errors import ConfigError
from infssm.methods.bases.inflora import Adapters, LoRAConfig
from infssm.methods.bases.seq import Seq
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import BatchLike, Context, Loader, TaskInfo, Terms, model_input
from infssm.methods.core.losses import data_loss
from infssm.methods.core.passes import evaluating, require_loader
from infssm.models.features import features, output_layer, train_only
from infssm.ssm import unwrap


@register_method
class Frozen(Seq):
    """Trains the whole model on the first task and only its classifier on later ones: the features stay.

    With ``first_session=lora`` the first task trains only LoRA pairs and the classifier (first-session adaptation).
    """

    name = "frozen"
    online = False
    freezes = True
    why_no_regularizers = "the features of frozen do not move, so there is nothing to regularize"
    Config = LoRAConfig
    config: LoRAConfig

    def __init__(self, config: LoRAConfig, context: Context) -> None:
        super().__init__(config, context)
        self.adapters = Adapters(context, config, self.name) if config.first_session == "lora" else None

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """From the second task on, gradients only for the classifier; before that, as ``first_session`` says."""
        if self.adapters is not None and task.index == 0:
            loader = require_loader(loader, self.name, "chooses the directions it trains by the task's data")
            self.adapters.begin(self.adapters.moments(loader))
        self._freeze(task)

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """On the first task the LoRA pairs, where it trains such."""
        return groups if self.adapters is None else self.adapters.param_groups(groups)

    def after_step(self) -> None:
        """Write the LoRA pairs into the weights."""
        if self.adapters is not None:
            self.adapters.after_step()

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """The weights keep what the LoRA pairs learned."""
        if self.adapters is not None:
            self.adapters.end()

    def loss(self, batch: BatchLike) -> Terms:
        """One term: the cross-entropy, or the squared error where targets are numbers."""
        task = self.context.current
        if task.index == 0:
            return super().loss(batch)
        module = unwrap(self.context.module)
        with evaluating(module):
            rows = features(module, model_input(batch))
        return data_loss(output_layer(module)(rows), batch, self.columns(task))

    def state_dict(self) -> dict[str, Any]:
        """The LoRA pairs in training, if any."""
        return {} if self.adapters is None else {"pairs": self.adapters.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the LoRA pairs, and freeze what was frozen when the state was saved."""
        if self.adapters is not None:
            self.adapters.load_state_dict(state["pairs"])
        if self.context.task is not None:
            self._freeze(self.context.task)

    def _freeze(self, task: TaskInfo) -> None:
        module = unwrap(self.context.module)
        if task.index > 0:
            train_only(module)
            if shared := [name for name, p in module.named_parameters() if p.requires_grad and "embed" in name]:
                raise ConfigError(
                    f"frozen: the output layer shares its weights with {shared[0]}, so the features would move; create "
                    "the model with tie_embeddings=False"
                )
