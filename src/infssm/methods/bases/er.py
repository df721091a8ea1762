"""ER: train on the stream and on images drawn from a reservoir of all past ones."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, BatchLike, ComponentConfig, TaskInfo, Terms, model_input
from infssm.methods.core.losses import data_loss
from infssm.methods.replay.rehearsal import ReplayConfig, StreamReplay

Mask = Literal["full", "seen", "current+seen"]


class ERConfig(ReplayConfig):
    """Options of :class:`ER`."""

    buffer_size: int = Field(500, gt=0, description="images kept; 500 on ImageNet-R, 1000 elsewhere (Tables 14-19)")
    mask: Mask = Field(
        "full",
        description="logits in the softmax: 'full' all classes (Mammoth), 'seen' those met so far, 'current+seen' the "
        "current task's for its images and those met so far for replayed ones",
    )


@register_method
class ER(StreamReplay):
    """Experience replay: every batch of new images is joined by some old ones from a small memory.

    Cross-entropy over stream and replayed images in one batch.

    Paper: Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019, arXiv:1902.10486
    """

    name = "er"
    online: ClassVar[bool] = True
    supported_data: ClassVar[frozenset[str]] = ALL_DATA
    Config: ClassVar[type[ComponentConfig]] = ERConfig
    config: ERConfig

    def columns(self, task: TaskInfo) -> slice:
        """The columns that the option ``mask`` selects for the task's own samples."""
        if self.config.mask == "full":
            return slice(None)
        classes = self.context.classes(self.name, task)
        return slice(0 if self.config.mask == "seen" else classes.start, classes.stop)

    def loss(self, batch: BatchLike) -> Terms:
        """One term: the cross-entropy of the stream's samples and the replayed ones, in one forward."""
        both, count = batch, len(batch.y)
        if self.replays:
            drawn = self.buffer.get(self.draw(self.replay_count(count)))
            both = self.context.modality.join(batch, drawn, self.augmented)
        self.remember(**self.rows_of(batch))
        logits = self.context.forward(model_input(both), current_rows=count)
        if both.y.ndim > 1 or both.y.is_floating_point():  # next tokens, numbers: no classes to mask
            return data_loss(logits, both, slice(None))
        mask = self.config.mask
        classes = range(0) if mask == "full" else self.context.classes(self.name)
        return {"ce": masked_cross_entropy(logits, both.y, current_rows=count, classes=classes, mask=mask)}


def masked_cross_entropy(logits: Tensor, labels: Tensor, *, current_rows: int, classes: range, mask: Mask) -> Tensor:
    """Mean cross-entropy of ``logits: [b, K]``; the first ``current_rows`` rows are of the task with ``classes``.

    labels: [b]. mask: which columns enter the softmax, see :class:`ERConfig`.
    """
    if mask == "full":
        return F.cross_entropy(logits, labels)
    column = torch.arange(logits.shape[1], device=logits.device)
    hidden = (column >= classes.stop).expand(logits.shape)
    if mask == "current+seen":
        from_stream = torch.arange(len(logits), device=logits.device)[:, None] < current_rows
        hidden = hidden | (from_stream & (column < classes.start))
    return F.cross_entropy(logits.masked_fill(hidden, -torch.inf), labels)
