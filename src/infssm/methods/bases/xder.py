"""X-DER: DER++ whose stored logits are revised as classes arrive and whose future heads are prepared beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from infssm._modality import raw_images
from infssm._processes import gather_in_graph, gather_rows, process_slice
from infssm.errors import ConfigError
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import BatchLike, Context, Loader, TaskInfo, Terms
from infssm.methods.core.passes import evaluating, require_loader
from infssm.methods.replay.buffers import BalancedBuffer
from infssm.methods.replay.rehearsal import Replay, ReplayConfig, Replayed
from infssm.ssm import logits_of


def revised_logits(stored: Tensor, new: Tensor, labels: Tensor, columns: slice, gamma: float) -> Tensor:
    """``stored: [m, K]`` with the given columns taken from ``new: [m, K]``, kept below the true class's stored logit.

    Where the largest of the new values exceeds ``l = stored[label]`` they are all multiplied by ``gamma · l / max``.
    A negative ``l`` flips their signs, as in the reference implementation; where the largest is 0, as in heads that
    start at 0, no factor changes it and the values stay.
    """
    values = new[:, columns]
    true = stored.gather(1, labels[:, None])
    top = values.amax(dim=1, keepdim=True)
    revised = stored.clone()
    revised[:, columns] = torch.where((top > true) & (top != 0), values * (gamma * true / top), values)
    return revised


def supervised_contrast(views: Tensor, labels: Tensor, *, temperature: float, base_temperature: float) -> Tensor:
    """Supervised contrastive loss of unit vectors ``views: [b, v, d]`` with ``labels: [b]``, summed over images.

    Per anchor: minus the mean over its positives (other views of its class) of the log-softmax over all other views
    of ``v_a · v_p / temperature``; averaged over the views of an image, times temperature / base_temperature.
    """
    images, count, _ = views.shape
    flat = views.transpose(0, 1).reshape(images * count, -1)
    owner = labels.repeat(count)
    itself = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    scores = (flat @ flat.T / temperature).masked_fill(itself, -torch.inf)
    log_probability = scores - scores.logsumexp(dim=1, keepdim=True)
    positive = (owner[:, None] == owner) & ~itself
    mean = log_probability.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1)
    return -(temperature / base_temperature) * mean.sum() / count


def consistency(
    logits: Tensor, labels: Tensor, *, widths: Sequence[int], temperature: float, base_temperature: float
) -> Tensor:
    """Supervised contrast of every future head's normalised logits, mean over heads and images.

    logits: [b, v, sum of widths] of v views, labels: [b].
    """
    heads = [F.normalize(head, dim=2) for head in torch.split(logits, list(widths), dim=2)]
    contrast = {"temperature": temperature, "base_temperature": base_temperature}
    return torch.stack([supervised_contrast(head, labels, **contrast) for head in heads]).mean() / len(labels)


def similarity_distance(logits: Tensor, stored: Tensor) -> Tensor:
    """``|N(Z Zᵀ) - N(Y Yᵀ)|² / m²`` for ``logits Z: [m, d]`` and ``stored Y: [m, d]``; N divides rows by their L1 norm.

    The reference implementation normalises by L1, similarity-preserving distillation as published by L2.
    """
    new, old = (F.normalize(z @ z.T, p=1.0, dim=1) for z in (logits, stored))
    return (new - old).square().sum() / len(logits) ** 2


def distance_preservation(logits: Tensor, stored: Tensor, *, widths: Sequence[int]) -> Tensor:
    """Mean :func:`similarity_distance` over heads and views. logits: [m, v, sum of widths], stored: [m, sum]."""
    sizes = list(widths)
    distances = [
        similarity_distance(view, old)
        for head, old in zip(torch.split(logits, sizes, dim=2), torch.split(stored, sizes, dim=1), strict=True)
        for view in head.unbind(dim=1)
    ]
    return torch.stack(distances).mean()


def head_margin(bad: Tensor, good: Tensor, margin: float) -> Tensor:
    """Mean of the positive ``max(bad) + margin - max(good)`` over rows; 0 if none is. bad: [b, p], good: [b, q]."""
    gap = bad.amax(dim=1) + margin - good.amax(dim=1)
    return gap.clamp(min=0).sum() / (gap > 0).sum().clamp(min=1)


def past_margin(logits: Tensor, past: slice, present: slice, margin: float) -> Tensor:
    """:func:`head_margin` of probabilities over past and present classes; no gradient to the past. logits: [b, K]."""
    probabilities = logits[:, past.start : present.stop].softmax(dim=1)
    return head_margin(probabilities[:, past].detach(), probabilities[:, present], margin)


def true_head(logits: Tensor, labels: Tensor, widths: Sequence[int]) -> Tensor:
    """The head each label belongs to: ``logits: [m, sum of widths]`` to ``[m, largest width]``, -inf beyond a head."""
    most = max(widths)
    heads = [
        F.pad(head, (0, most - head.shape[1]), value=-torch.inf) for head in torch.split(logits, list(widths), dim=1)
    ]
    ends = torch.tensor(widths, device=labels.device).cumsum(0)
    return torch.stack(heads, dim=1)[
        torch.arange(len(labels), device=logits.device), torch.bucketize(labels, ends, right=True)
    ]


def first_occurrence(values: Tensor) -> Tensor:
    """Mask ``[m]`` of the entries of ``values: [m]`` that appear for the first time."""
    earlier = torch.ones(len(values), len(values), dtype=torch.bool, device=values.device).tril(-1)
    return ~((values[:, None] == values) & earlier).any(dim=1)


def spread(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Split ``total`` into shares ``[count]`` that differ by at most one, the larger ones at random places."""
    shares = torch.full((count,), total // count)
    shares[torch.randperm(count, generator=generator)[: total % count]] += 1
    return shares


class XDERConfig(ReplayConfig):
    """Options of :class:`XDER`."""

    alpha: float = Field(0.3, ge=0, description="weight of the logit term (Mammoth on CIFAR-100: 0.3)")
    beta: float = Field(1.8, ge=0, description="weight of the label term (Mammoth on CIFAR-100: 0.8)")
    gamma: float = Field(
        0.85, ge=0, description="revised logits stay below gamma times the true class's (Mammoth: 0.85)"
    )
    temperature: float = Field(0.07, gt=0, description="of the contrastive term (Mammoth: 5)")
    base_temperature: float = Field(0.07, gt=0, description="divides the temperature's factor (Mammoth: temperature)")
    simclr_batch_size: int = Field(32, gt=0, description="buffer images in the contrastive term (Mammoth: 64)")
    simclr_num_aug: int = Field(2, ge=2, description="strong views per image (Mammoth: 4)")
    lambda_cons: float = Field(0.05, ge=0, description="weight of the contrastive term (Mammoth: 0.05)")
    dp_weight: float = Field(0.1, ge=0, description="weight of distance preservation (Mammoth: 0; 3000 on CIFAR-100)")
    margin: float = Field(0.3, ge=0, description="margin of the head constraints, in logits (Mammoth: 0.3)")
    eta: float = Field(0.1, ge=0, description="weight of the head constraints (Mammoth: 0.1)")
    future_constraint: bool = Field(True, description="hold future heads below the right one (Mammoth: on)")
    past_constraint: bool = Field(False, description="hold past heads below the present one (Mammoth: off)")


class _Heads(NamedTuple):
    """Columns of the logits seen from the present task; ``widths`` are the classes of all heads."""

    widths: tuple[int, ...]
    past: slice
    present: slice
    future: slice
    future_widths: tuple[int, ...]


class _Views(NamedTuple):
    """Strong views ``x: [n·v, ...]`` of images with ``labels: [n]``; the first s lie in ``slots: [s]``."""

    x: Tensor
    labels: Tensor
    slots: Tensor | None


@register_method
class XDER(Replay):
    """Replay whose stored outputs are brought up to date with new classes, with places kept for classes to come.

    The logits of the present task learn from the stream, those of past tasks from replayed labels, all from stored
    logits, and those of future tasks by contrasting images.

    Paper: Boschini et al., Class-Incremental Continual Learning into the eXtended DER-verse, TPAMI 2022,
    arXiv:2201.00766
    """

    name = "x-der"
    why_needs_total = "it prepares the outputs of future classes"
    supports_domains = False
    Config = XDERConfig
    config: XDERConfig
    buffer: BalancedBuffer
    saved = (*Replay.saved, "updates")

    def __init__(self, config: XDERConfig, context: Context) -> None:
        super().__init__(config, context)
        self.updates = torch.zeros(config.buffer_size)
        """How often each slot's logits came up for revision in this task."""

    def make_buffer(self) -> BalancedBuffer:
        """Class-balanced images with logits; ``task`` is the task that last revised them."""
        return BalancedBuffer(self.config.buffer_size, ("image", "label", "logits", "task"), seed=self.context.seed)

    @property
    def heads(self) -> _Heads:
        """The heads seen from the current task."""
        classes, total = self.context.classes(self.name), self.context.num_classes
        widths = self.context.task_sizes
        if widths is None:
            if total is None or total % len(classes):
                raise ConfigError(
                    "x-der prepares heads of future tasks: give task_sizes, or num_classes, a multiple of the task's"
                )
            widths = (len(classes),) * (total // len(classes))
        past, seen = slice(0, classes.start), slice(classes.start, classes.stop)
        return _Heads(widths, past, seen, slice(seen.stop, sum(widths)), widths[self.context.current.index + 1 :])

    def columns(self, task: TaskInfo) -> slice:
        """The present head's."""
        classes = self.context.classes(self.name, task)
        return slice(classes.start, classes.stop)

    def loss(self, batch: BatchLike) -> Terms:
        """The terms ``stream``, ``logits``, ``labels``, ``consistency``, ``distances``, ``future`` and ``past``.

        Those of replay need a buffer, those of future heads need some to be left.
        """
        self.trained = True
        drawn = [self.replay(len(batch.y)) for _ in range(2)] if self.replays else []
        views = self._views(batch) if self.heads.future_widths else None
        parts = [batch.x, *[d.x for d in drawn], *([views.x] if views else [])]
        logits = self.context.forward(torch.cat(parts), current_rows=len(batch.y))
        current, *others = torch.split(logits, [len(part) for part in parts])
        terms = {"stream": F.cross_entropy(current[:, self.heads.present], batch.y - self.heads.present.start)}
        if drawn:
            terms |= self._replay_terms(others[:2], drawn)
        if views:
            terms |= self._future_terms(others[-1], views)
        return terms | self._constraints(gather_in_graph(current), others[:2], drawn)

    def _replay_terms(self, logits: Sequence[Tensor], drawn: Sequence[Replayed]) -> Terms:
        """All heads to the stored logits, past heads to the labels; then revise what is stored."""
        first, second = (entries for _, _, entries in drawn)
        past = logits[1][:, self.heads.past]
        terms = {
            "logits": self.config.alpha * F.mse_loss(logits[0], self.to_device(first["logits"]).to(logits[0].dtype)),
            "labels": self.config.beta * F.cross_entropy(past, self.to_device(second["label"])),
        }
        self._revise(torch.cat([d.slots for d in drawn]), torch.cat(list(logits)).detach())
        return terms

    def _constraints(self, current: Tensor, logits: Sequence[Tensor], drawn: Sequence[Replayed]) -> Terms:
        """The right head above future ones and the present above past ones, over all images of all processes."""
        heads, margin, terms = self.heads, self.config.margin, {}
        if self.config.future_constraint and heads.future_widths:
            good, bad = [current[:, heads.present].amax(dim=1, keepdim=True)], [current[:, heads.future]]
            if drawn:
                # Both draws may have an image: it counts once.
                once = first_occurrence(gather_rows(torch.cat([d.slots for d in drawn])))
                labels = self.to_device(gather_rows(torch.cat([d.entries["label"] for d in drawn]))[once])
                replayed = gather_in_graph(torch.cat(list(logits)))[self.to_device(once)]
                good.append(true_head(replayed, labels, heads.widths).amax(dim=1, keepdim=True))
                bad.append(replayed[:, heads.future])
            terms["future"] = self.config.eta * head_margin(torch.cat(bad), torch.cat(good), margin)
        if self.config.past_constraint and self.context.current.index > 0:
            terms["past"] = self.config.eta * past_margin(current, heads.past, heads.present, margin)
        return terms

    def _revise(self, slots: Tensor, logits: Tensor) -> None:
        """Present and future columns of replayed entries follow the model, the u-th time with probability 1/u."""
        slots, logits = gather_rows(slots), gather_rows(logits).cpu().float()
        once = first_occurrence(slots)
        slots, logits = slots[once], logits[once]
        self.updates[slots] += 1
        accepted = torch.rand(len(slots), generator=self.buffer.generator) * self.updates[slots] < 1
        self._transplant(slots[accepted], logits[accepted])

    def _transplant(self, slots: Tensor, logits: Tensor) -> None:
        columns = slice(self.heads.present.start, None)
        entries = self.buffer.get(slots)
        self.buffer["logits"][slots] = revised_logits(
            entries["logits"], logits, entries["label"], columns, self.config.gamma
        )
        self.buffer["task"][slots] = self.context.current.index

    def _views(self, batch: BatchLike) -> _Views:
        """Strong views of buffer images and of the stream's."""
        raw, labels, slots = raw_images(batch, self.name).cpu(), batch.y, None
        if self.replays:
            slots = self.draw(self.config.simclr_batch_size)
            entries = self.buffer.get(slots)
            raw = torch.cat((entries["image"], raw))
            labels = torch.cat((self.to_device(entries["label"]), labels))
        repeated = raw.repeat_interleave(self.config.simclr_num_aug, dim=0)
        return _Views(self.context.strongly_augmented(repeated, self.buffer.fresh_generator()), labels, slots)

    def _future_terms(self, logits: Tensor, views: _Views) -> Terms:
        """Future heads tell classes apart, and keep the distances of stored logits. logits: [n·v, K].

        Images are compared with those of all processes. Stored logits are read here, after this step's revision, as in
        the reference implementation.
        """
        config, widths = self.config, self.heads.future_widths
        future = logits[:, self.heads.future].reshape(len(views.labels), config.simclr_num_aug, -1)
        contrast = consistency(
            gather_in_graph(future),
            gather_rows(views.labels),
            widths=widths,
            temperature=config.temperature,
            base_temperature=config.base_temperature,
        )
        terms = {"consistency": config.lambda_cons * contrast}
        if config.dp_weight and views.slots is not None:
            stored = self.to_device(self.buffer["logits"][views.slots])[:, self.heads.future].to(future.dtype)
            kept = gather_in_graph(future[: len(stored)])
            distances = distance_preservation(kept, gather_rows(stored), widths=widths)
            terms["distances"] = config.dp_weight * distances
        return terms

    def finish(self, task: TaskInfo, loader: Loader | None) -> None:
        """Trim the buffer, store the task's images with their logits, and revise the logits of older ones."""
        loader = require_loader(loader, self.name, "fills its buffer when a task ends")
        if task.index > 0:
            self.buffer.trim(self.buffer.quota(self.heads.present.stop))
        with evaluating(self.context.module):
            self._store(loader)
            if task.index > 0:
                self._revise_all()
        self.updates.zero_()

    def _store(self, loader: Loader) -> None:
        """Fill the buffer with equal numbers of each class, past columns of their logits revised."""
        heads, task = self.heads, self.context.current.index
        wanted = spread(
            self.buffer.capacity - len(self.buffer), heads.present.stop - heads.present.start, self.buffer.generator
        )
        for batch in loader:
            if not wanted.any():
                return
            logits = logits_of(self.context.module(self.to_device(batch.x)))
            if task > 0:
                logits = revised_logits(logits, logits, self.to_device(batch.y), heads.past, self.config.gamma)
            rows = self.buffer.gather(
                image=raw_images(batch, self.name), label=batch.y, logits=logits, task=torch.full_like(batch.y, task)
            )
            taken = []
            for row, head in enumerate((rows["label"] - heads.present.start).tolist()):
                if wanted[head] > 0:
                    wanted[head] -= 1
                    taken.append(row)
            self.buffer.append(**{field: values[taken] for field, values in rows.items()})

    def _revise_all(self) -> None:
        older = torch.nonzero(self.buffer["label"] < self.heads.present.start).flatten()
        for slots in torch.split(older, 64):
            mine = process_slice(slots)
            x = self.context.augmented(self.buffer["image"][mine], self.buffer.fresh_generator())
            self._transplant(slots, gather_rows(logits_of(self.context.module(x))).cpu().float())
