"""LUCIR: a cosine classifier, features held to the old model's, margins for old classes, herded exemplars.

Training data of later tasks are the task's images and the whole buffer, each once per epoch. The stream's batches keep
their size here, and every batch gets the share of a shuffled buffer that is due at its place in the epoch (other
implementations shuffle both into one data set, which makes more steps of the same size).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm._modality import raw_images
from infssm._processes import gather_rows, process_slice, sum_over_processes, this_share
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import BatchLike, Context, Loader, TaskInfo, Terms
from infssm.methods.core.losses import train_step
from infssm.methods.core.passes import capture, evaluating, require_loader
from infssm.methods.heads.trained import CosineClassifier
from infssm.methods.replay.buffers import BalancedBuffer
from infssm.methods.replay.rehearsal import Replay, ReplayConfig
from infssm.models.features import features as features_of
from infssm.models.features import find_classifier
from infssm.ssm import unwrap


def less_forget(features: Tensor, old: Tensor) -> Tensor:
    """``mean(1 - cos)`` between ``features: [b, d]`` of the new and ``old: [b, d]`` of the reference model."""
    return 1 - F.cosine_similarity(features, old, dim=1).mean()


def less_forget_weight(base: float, task: int, rule: Literal["paper", "mammoth"], classes: range) -> float:
    """Weight of the less-forget term on task t > 0, whose classes are given.

    The LUCIR paper has ``base·sqrt(old classes / new classes)``, which is sqrt(t) for tasks of equal size; Mammoth
    ``base·sqrt(t - 1)``, as it updates the weight at the end of a task, one task late.
    """
    return base * math.sqrt(classes.start / len(classes) if rule == "paper" else task - 1)


def margin_ranking(cosines: Tensor, labels: Tensor, *, classes: range, count: int, margin: float) -> Tensor:
    """Hinge that keeps the true class of old-class images ahead of the ``count`` nearest classes of this task.

    ``mean(max(0, margin - (cos_true - cos_new)))`` over images whose label is below ``classes`` and their ``count``
    largest cosines within ``classes``; 0 without such images. cosines: [b, K], labels: [b].
    """
    rows = labels < classes.start
    if not bool(rows.any()):
        return cosines.new_zeros(())
    true = cosines[rows].gather(1, labels[rows, None])
    nearest = cosines[rows, classes.start : classes.stop].topk(min(count, len(classes)), dim=1).values
    return (margin - (true - nearest)).clamp(min=0).mean()


def imprinted(sums: Tensor, old_weights: Tensor | None) -> Tensor:
    """Class weights from ``sums: [k, d]`` of L2-normalised features: their directions, as long as old weights are.

    ``old_weights: [n, d]``; without any, length 1.
    """
    length = 1.0 if old_weights is None else old_weights.norm(dim=1).mean()
    return F.normalize(sums, dim=1) * length


def herd(features: Tensor, count: int) -> Tensor:
    """Choose rows of ``features: [n, d]`` whose running mean stays nearest to the mean of all.

    Returns their indices ``[min(count, n)]`` in order of choice. Greedy: step s takes the row that minimises
    ``|mean - (row + sum of chosen) / s|``, each row once; the first of equals.
    """
    features = features.double()
    mean = features.mean(dim=0)
    total = torch.zeros_like(mean)
    free = torch.ones(len(features), dtype=torch.bool, device=features.device)
    chosen: list[int] = []
    for step in range(1, min(count, len(features)) + 1):
        gap = (mean - (features + total) / step).square().sum(dim=1)
        index = int(gap.masked_fill(~free, torch.inf).argmin())
        free[index] = False
        total += features[index]
        chosen.append(index)
    return torch.tensor(chosen, dtype=torch.int64)


class LUCIRConfig(ReplayConfig):
    """Options of :class:`LUCIR`."""

    buffer_size: int = Field(500, gt=0, description="images kept; 500 on ImageNet-R, 1000 elsewhere (Tables 14-19)")
    lambda_base: float = Field(0.5, ge=0, description="less-forget weight before scaling by task (Mammoth: 5)")
    lambda_rule: Literal["mammoth", "paper"] = Field(
        "mammoth",
        description="scale on task t: 'mammoth' sqrt(t - 1), so 0 on task 1; 'paper' (LUCIR's) sqrt(old / new classes)",
    )
    lambda_mr: float = Field(0.1, ge=0, description="weight of the margin ranking term (Mammoth: 1)")
    k_mr: int = Field(2, ge=1, description="new classes each old-class image is ranked against (Mammoth: 2)")
    margin: float = Field(0.05, ge=0, description="margin of the ranking, in cosines (Mammoth: 0.5)")
    imprint: bool = Field(
        True, description="start new class weights at their mean features (Mammoth; not in the paper)"
    )
    finetune_epochs: int = Field(
        20,
        ge=0,
        description="epochs of the classifier on the balanced buffer after each task (Mammoth; not in the paper)",
    )
    finetune_lr: float = Field(
        0.01, gt=0, description="SGD rate of these epochs, a tenth after 10 steps (Mammoth; not in the paper)"
    )
    finetune_batch: int | None = Field(
        None, gt=0, description="images per step of these epochs; null: as many as a step of training has (Mammoth)"
    )


@register_method
class LUCIR(Replay):
    """Compares features by angle only, keeps their angles to the old model's, and keeps chosen old images.

    ``CE + λ_t · mean(1 - cos(f, f_old)) + λ_mr · margin ranking`` on stream and due buffer images.

    Paper: Hou et al., Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019
    """

    name = "lucir"
    why_needs_total = "its classifier has one block of outputs for every task"
    supports_domains = False
    Config = LUCIRConfig
    own_first_task = True
    config: LUCIRConfig
    own_classifier = True
    needs_old = True
    buffer: BalancedBuffer
    saved = (*Replay.saved, "task_images", "position", "order")

    def __init__(self, config: LUCIRConfig, context: Context) -> None:
        super().__init__(config, context)
        head = find_classifier(context.module).module
        assert isinstance(head, CosineClassifier)
        self.head = head
        self.task_images = 0
        self.position = 0
        self.order = torch.zeros(0, dtype=torch.int64)

    def make_buffer(self) -> BalancedBuffer:
        """Class-balanced, filled in herding order."""
        return BalancedBuffer(self.config.buffer_size, ("image", "label"), seed=self.context.seed)

    @classmethod
    def prepare(cls, config: LUCIRConfig, context: Context) -> nn.Module:  # noqa: ARG003
        """Replace the model's classifier by a cosine classifier with one block per task."""
        place, like = find_classifier(context.module), next(context.module.parameters())
        classifier = CosineClassifier(place.in_features, context.sizes(cls.name))
        place.replace(classifier.to(like.device, like.dtype))
        return context.module

    def start(self, task: TaskInfo, loader: Loader | None) -> None:
        """From the second task on: a fresh, imprinted block, and the size of the task for the buffer's share."""
        self.head.train_block(task.index)
        if task.index == 0:
            return
        if self.context.old is not None:
            self.context.old.follow()  # the block, frozen until now, is about to change
        self.head.reset(task.index)
        loader = require_loader(loader, self.name, "imprints new classes and counts the task's images")
        self._measure(loader, imprint=self.config.imprint)
        self._shuffle()

    def begin_epoch(self, epoch: int, epochs: int) -> None:  # noqa: ARG002
        """Shuffle the buffer for the epoch."""
        self._shuffle()

    def _shuffle(self) -> None:
        self.position = 0
        world = this_share().world
        self.order = self.buffer.sample(len(self.buffer) // world * world)

    def loss(self, batch: BatchLike) -> Terms:
        """The terms ``ce``, and from the second task on ``less_forget`` and ``margin``."""
        self.trained = True
        x, y, current_rows = batch.x, batch.y, len(batch.y)
        due = self._due(current_rows)
        if len(due):
            entries = self.buffer.get(due)
            x = torch.cat((x, self.context.augmented(entries["image"], self.buffer.fresh_generator())))
            y = torch.cat((y, self.to_device(entries["label"])))
        with capture(self.head, inputs=True) as seen:
            logits = self.context.forward(x, current_rows=current_rows)
        return {"ce": F.cross_entropy(logits, y)} | self._constraints(x, y, seen[0])

    def _constraints(self, x: Tensor, y: Tensor, features: Tensor) -> Terms:
        task, reference = self.context.current.index, self.context.old
        if reference is None or task == 0:
            return {}
        old = reference.features(x)
        classes = self.context.classes(self.name)
        weight = less_forget_weight(self.config.lambda_base, task, self.config.lambda_rule, classes)
        return {"less_forget": weight * less_forget(features, old), "margin": self._margin_term(features, y)}

    def _margin_term(self, features: Tensor, labels: Tensor) -> Tensor:
        config, classes = self.config, self.context.classes(self.name)
        cosines = self.head.cosines(features)
        return config.lambda_mr * margin_ranking(
            cosines, labels, classes=classes, count=config.k_mr, margin=config.margin
        )

    def _due(self, current_rows: int) -> Tensor:
        """Buffer slots that are due with the next ``current_rows`` images of each process: this process's share."""
        if not self.replays or not self.task_images or self.context.current.index == 0:
            return self.order[:0]
        if self.position >= self.task_images:
            self._shuffle()
        world = this_share().world  # every share is a multiple of it, so that all processes get equally many
        self.position += current_rows * world
        left = max(self.task_images - self.position, 0)
        if left < current_rows * world:  # a smaller last batch may be left out: what is due with it comes now
            left = 0
        total = len(self.buffer) // world * world
        kept = total - (self.task_images - left) * total // self.task_images // world * world
        given = len(self.order) - kept
        due, self.order = self.order[:given], self.order[given:]
        return process_slice(due)

    def finish(self, task: TaskInfo, loader: Loader | None) -> None:
        """Herd the task's exemplars, and fine-tune the classifier on the balanced buffer."""
        loader = require_loader(loader, self.name, "herds exemplars of the task")
        if not self.trained:
            self._measure(loader, imprint=True)
        batch_size = self._store(loader, self.context.classes(self.name), task)
        self._finetune(self.config.finetune_batch or batch_size)

    @torch.no_grad()
    def _measure(self, loader: Loader, *, imprint: bool) -> None:
        """Count the task's images and, to ``imprint``, set the new block to directions of mean features."""
        block, classes = self.context.current.index, self.context.classes(self.name)
        sums = torch.zeros(len(classes), self.head.weights[block].shape[1], device=self.context.device)
        count = torch.zeros(1, device=self.context.device)
        with evaluating(self.context.module):
            for batch in loader:
                count += len(batch.y)
                features = F.normalize(self._features(batch), dim=1).to(sums.dtype)
                sums.index_add_(0, self.to_device(batch.y) - classes.start, features)
        self.task_images = int(sum_over_processes([count])[0])
        if imprint:
            old = torch.cat(list(self.head.weights)[:block]) if block else None
            self.head.weights[block].copy_(imprinted(sum_over_processes([sums])[0], old))

    def _features(self, batch: BatchLike) -> Tensor:
        """Features ``[b, d]`` of the images without augmentation."""
        return features_of(unwrap(self.context.module), self.context.normalized(raw_images(batch, self.name)))

    def _store(self, loader: Loader, classes: range, task: TaskInfo) -> int:
        """Trim old classes to the new quota and add the new ones in herding order; returns the images of a batch.

        All raw images of the task are held in memory meanwhile: herding must see a class whole.
        """
        rows = []
        with evaluating(self.context.module):
            for batch in loader:
                gathered = self.buffer.gather(image=raw_images(batch, self.name), label=batch.y)
                rows.append((gathered["image"], gathered["label"], gather_rows(self._features(batch)).cpu()))
        images, labels, features = (torch.cat(column) for column in zip(*rows, strict=True))
        quota = self.buffer.quota(classes.stop)
        if task.index:
            self.buffer.trim(quota)
        for label in classes:
            mine = torch.nonzero(labels == label).flatten()
            chosen = mine[herd(features[mine], quota)] if len(mine) else mine
            self.buffer.append(image=images[chosen], label=labels[chosen])
        return max(len(column[1]) for column in rows)

    def _finetune(self, batch_size: int) -> None:
        """Train the current block and the scale on the buffer; the features stay as they are.

        Every process does the same, on all of the buffer.
        """
        trainable = [p for p in self.head.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=self.config.finetune_lr)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[10], gamma=0.1)
        optimizer.zero_grad()

        def loss(slots: Tensor) -> Terms:
            entries = self.buffer.get(slots)
            x = self.context.augmented(entries["image"], self.buffer.fresh_generator(per_process=False))
            with evaluating(self.context.module):
                features = features_of(unwrap(self.context.module), x)
            labels = self.to_device(entries["label"])
            terms = {"ce": F.cross_entropy(self.head(features), labels)}
            return terms | ({"margin": self._margin_term(features, labels)} if self.context.current.index else {})

        for _ in range(self.config.finetune_epochs):
            for slots in torch.split(self.buffer.sample(len(self.buffer)), batch_size):
                train_step(partial(loss, slots), optimizer, after_update=schedule.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the buffer and the place in the epoch, and train the block that was trained."""
        super().load_state_dict(state)
        if self.context.task is not None:
            self.head.train_block(self.context.task.index)
