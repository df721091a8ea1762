"""Seq: plain training on one task after the other, the lower bound; and Joint, the upper bound."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, Base, BatchLike, ComponentConfig, TaskInfo, Terms, model_input
from infssm.methods.core.losses import data_loss


class SeqConfig(ComponentConfig):
    """Options of :class:`Seq`."""

    mask: Literal["current", "seen", "full"] = Field(
        "current",
        description="logits in the softmax: 'current' the task's (released code), 'seen' those met so far, 'full' all",
    )


@register_method
class Seq(Base):
    """Plain training on one task after another, which forgets; the base of every regularizer."""

    name = "seq"
    online = True
    Config: ClassVar[type[ComponentConfig]] = SeqConfig
    supported_data = ALL_DATA
    config: SeqConfig

    def columns(self, task: TaskInfo) -> slice:
        """The columns that the option ``mask`` selects."""
        if self.config.mask == "full":
            return slice(None)
        return task.block if self.config.mask == "current" else task.seen

    def loss(self, batch: BatchLike) -> Terms:
        """One term: the cross-entropy, or the squared error where targets are numbers."""
        logits = self.context.forward(model_input(batch))
        return data_loss(logits, batch, self.columns(self.context.current))


@register_method
class Joint(Seq):
    """Trains on the data of all tasks so far at once: the upper bound, which keeps all data."""

    name = "joint"
    online = False
    Config = ComponentConfig
    joint = True
    why_no_regularizers = "joint training sees all data at once, so there is nothing to regularize"

    def columns(self, task: TaskInfo) -> slice:
        """All seen classes."""
        return task.seen
