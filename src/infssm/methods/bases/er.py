"""ER, DER and DER++: replay of images from a reservoir of all past ones, with their labels or with stored logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from infssm._modality import raw_images
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, BatchLike, ComponentConfig, TaskInfo, Terms, model_input
from infssm.methods.core.losses import data_loss
from infssm.methods.replay.buffers import ReservoirBuffer
from infssm.methods.replay.rehearsal import ReplayConfig, Replayed, StreamReplay

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
    """Experience replay: adds some old images from a small memory to every batch of new ones.

    Cross-entropy over stream and replayed images in one batch.

    Paper: Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019, arXiv:1902.10486
    """

    name = "er"
    online = True
    supported_data = ALL_DATA
    Config = ERConfig
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


class DERConfig(ReplayConfig):
    """Options of :class:`DER`."""

    alpha: float = Field(0.3, ge=0, description="weight of the logit term (Mammoth on CIFAR-100; not in the paper)")


class DERPlusPlusConfig(DERConfig):
    """Options of :class:`DERPlusPlus`."""

    beta: float = Field(0.5, ge=0, description="weight of the label term (Mammoth on CIFAR-100; not in the paper)")


@register_method
class DER(StreamReplay):
    """Replays old images with the outputs (logits) that the model gave when it stored them as targets.

    ``CE(stream) + alpha · MSE(logits now, logits stored)``, softmax over all classes.

    Paper: Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020, arXiv:2004.07211
    """

    name = "der"
    online = True
    why_needs_total = "the logits that it stores have one column for every class"
    Config: ClassVar[type[ComponentConfig]] = DERConfig
    config: DERConfig
    draws = 1
    """Independent replay draws per step."""

    def make_buffer(self) -> ReservoirBuffer:
        """A reservoir of images with their logits."""
        return ReservoirBuffer(self.config.buffer_size, ("image", "label", "logits"), seed=self.context.seed)

    def loss(self, batch: BatchLike) -> Terms:
        """The terms ``ce`` and ``logits`` (and ``labels`` of DER++)."""
        current_rows = len(batch.y)
        drawn = [self.replay(current_rows) for _ in range(self.draws)] if self.replays else []
        logits = self.context.forward(torch.cat([batch.x, *[d.x for d in drawn]]), current_rows=current_rows)
        parts = torch.split(logits, [current_rows, *[len(d.slots) for d in drawn]])
        self.remember(image=raw_images(batch, self.name), label=batch.y, logits=parts[0])
        return {"ce": F.cross_entropy(parts[0], batch.y)} | self.replayed_terms(drawn, parts[1:])

    def replayed_terms(self, drawn: Sequence[Replayed], logits: Sequence[Tensor]) -> Terms:
        """Terms of the replay draws and the ``logits: [m, K]`` they have now; none while the buffer is empty."""
        if not drawn:
            return {}
        return {"logits": self.config.alpha * logit_distance(logits[0], self.to_device(drawn[0].entries["logits"]))}

    def rows_of(self, batch: BatchLike) -> dict[str, Tensor]:
        """Images with the logits the model gives them."""
        logits = self.context.forward(batch.x.to(self.context.device))
        return {"image": raw_images(batch, self.name), "label": batch.y, "logits": logits}


@register_method
class DERPlusPlus(DER):
    """DER, which also replays a second batch of old images with their labels.

    DER plus ``beta · CE`` of a second draw's labels.

    Paper: Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020, arXiv:2004.07211
    """

    name = "der++"
    Config = DERPlusPlusConfig
    config: DERPlusPlusConfig
    draws = 2

    def replayed_terms(self, drawn: Sequence[Replayed], logits: Sequence[Tensor]) -> Terms:
        """The terms ``logits`` and ``labels``, each of its own draw."""
        if not drawn:
            return {}
        labels = F.cross_entropy(logits[1], self.to_device(drawn[1].entries["label"]))
        return super().replayed_terms(drawn, logits) | {"labels": self.config.beta * labels}


def logit_distance(logits: Tensor, stored: Tensor) -> Tensor:
    """Mean squared difference over images and classes of ``logits: [m, K]`` and ``stored: [m, K]``."""
    return F.mse_loss(logits, stored.to(logits.dtype))
