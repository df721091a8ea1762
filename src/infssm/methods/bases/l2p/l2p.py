"""L2P-R: learned prompts, chosen per image from a pool, with replay.

On Vim prompts stand before all other tokens, so that a block carries image content to them through its backward scan
alone. Everything is trained except the class token and the copy of the backbone that computes the queries.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from infssm.errors import ConfigError
from infssm.methods.bases.er import masked_cross_entropy
from infssm.methods.bases.l2p._prompts import PromptedModel, Selection, pull
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import BatchLike, ComponentConfig, Context, Loader, TaskInfo, Terms
from infssm.methods.core.passes import capture
from infssm.methods.replay.rehearsal import ReplayConfig, StreamReplay


class L2PRConfig(ReplayConfig):
    """Options of :class:`L2PR`."""

    buffer_size: int = Field(1000, gt=0, description="images kept; 1000, 2000 on CIFAR-100 (Tables 14-19)")
    pull: float = Field(0.1, ge=0, description="weight that pulls chosen keys to the query (Mammoth: 0.1, original: 1)")
    pool_size: int = Field(10, gt=0, description="prompts in the pool (Mammoth and original: 10; not in the paper)")
    length: int = Field(5, gt=0, description="tokens per prompt (Mammoth: 5, original: 10; not in the paper)")
    select: int = Field(5, gt=0, description="prompts per image (Mammoth: 5, original: 4; not in the paper)")
    mask: Literal["seen", "full"] = Field("seen", description="logits in the softmax: classes met so far, or all")

    @model_validator(mode="after")
    def _enough(self) -> L2PRConfig:
        if self.select > self.pool_size:
            raise ValueError(f"cannot select {self.select} prompts from a pool of {self.pool_size}")
        return self


@register_method
class L2PR(StreamReplay):
    """Learning to prompt, with replay: extra input tokens, chosen per image from a learned pool, tell tasks apart.

    ``CE - pull · mean over images of the sum of cos(query, chosen keys)``, with replay from the second task on.

    Paper: Wang et al., Learning to Prompt for Continual Learning, CVPR 2022, arXiv:2112.08654
    """

    name = "l2p-r"
    Config: ClassVar[type[ComponentConfig]] = L2PRConfig
    own_first_task: ClassVar[bool] = True
    config: L2PRConfig

    def __init__(self, config: L2PRConfig, context: Context) -> None:
        super().__init__(config, context)
        assert isinstance(context.module, PromptedModel)
        self.pool = context.module.prompt_pool

    @classmethod
    def prepare(cls, config: L2PRConfig, context: Context) -> nn.Module:
        """Wrap the model; its query copy is the model as it is now."""
        like = next(context.module.parameters())
        wrapped = PromptedModel(context.module, size=config.pool_size, length=config.length, select=config.select)
        wrapped.prompt_pool.to(like.device, like.dtype)
        return wrapped

    def columns(self, task: TaskInfo) -> slice:
        """The columns that the option ``mask`` selects."""
        return slice(None) if self.config.mask == "full" else slice(self.context.classes(self.name, task).stop)

    def loss(self, batch: BatchLike) -> Terms:
        """The terms ``ce`` and ``pull``."""
        x, y, current_rows = batch.x, batch.y, len(batch.y)
        if self.replays and self.context.current.index > 0:
            drawn = self.replay(current_rows)
            x, y = torch.cat((x, drawn.x)), torch.cat((y, self.to_device(drawn.entries["label"])))
        self.remember(**self.rows_of(batch))
        with capture(self.pool) as seen:
            logits = self.context.forward(x, current_rows=current_rows)
        selection: Selection = seen[0]
        # States are compared token by token, so the old model must be given the same prompts.
        self.context.old_forward_kwargs(indices=selection.indices[:current_rows])
        assert selection.similarity is not None
        classes = range(0) if self.config.mask == "full" else self.context.classes(self.name)
        ce = masked_cross_entropy(logits, y, current_rows=current_rows, classes=classes, mask=self.config.mask)
        return {"ce": ce, "pull": -self.config.pull * pull(selection.similarity)}

    def finish(self, task: TaskInfo, loader: Loader | None) -> None:
        """Refuse a first task that was not trained: there would be no prompts."""
        if not self.trained and task.index == 0:
            raise ConfigError("l2p-r must train task 0 itself, a checkpoint has no prompts: use train.task0=train")
        super().finish(task, loader)
