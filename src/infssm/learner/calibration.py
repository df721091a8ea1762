"""Probabilities that can be trusted, and samples unlike every class: both are set on samples that are left out.

Features of some samples of each class, never the samples, are kept, so that the calibration can be computed again
whenever classes are added or forgotten: it follows from the head and these features alone. A fitted head can do without
any of the samples that it was fitted to. What was trained cannot, so of a lesson that trains only samples are kept that
were held out of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infssm._optional import require
from infssm.errors import DataError
from infssm.methods import FittedHead, Head
from infssm.methods.heads.statistical import StatisticalHead
from infssm.models.features import output_layer
from infssm.ssm import unwrap

LIMIT = 32
"""Samples of each class whose features are kept."""
_EVERY = 5
"""One in so many samples of a class is held out of training, and left out of the head that probabilities are set on."""
_ENOUGH = 1024
"""Held-out samples, of all classes together, that set the temperature: the time of a lesson must not grow with the
square of the number of classes, and one number needs no more."""
_PRIOR = 16
"""Samples of a class that its mean distance must have to count as much as the mean of all classes."""


def held_out_rows(labels: Tensor) -> Tensor:
    """Which of a task's samples to hold out, given their ``labels: [n]``: indices in ascending order.

    Every fifth of each class, at most 32; one of a class with two to four samples, none of a class with one.
    """
    return kept_rows(labels, lambda own: own[_EVERY - 1 :: _EVERY] if len(own) >= _EVERY else own[1:][-1:])


def kept_rows(labels: Tensor, among: Callable[[Tensor], Tensor] = lambda own: own) -> Tensor:
    """At most 32 rows of each class, ascending: of a lesson without training those whose features are kept.

    ``among`` says which of the rows ``[m]`` of a class are chosen from.
    """
    rows = [_spread(among(own)) for own in _by_class(labels)]
    return torch.cat(rows).sort().values if rows else labels.new_empty(0)


def _spread(rows: Tensor, limit: int = LIMIT) -> Tensor:
    """At most ``limit`` of ``rows: [m]``, evenly spaced, so that early and late ones stay represented."""
    if len(rows) <= limit:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, limit).round().long()]


def _by_class(labels: Tensor) -> tuple[Tensor, ...]:
    """For every class up to the largest of ``labels: [m]`` the rows of its samples, in their order."""
    return torch.split(labels.argsort(stable=True), labels.bincount().tolist())


@dataclass(frozen=True)
class HeldOut:
    """Features of samples that a head can be examined on, at most 32 of each class.

    Attributes:
        features: float32 [m, d], transformed as those that the head takes statistics of.
        labels: int64 [m].
    """

    features: Tensor
    labels: Tensor

    @classmethod
    def empty(cls, width: int) -> HeldOut:
        """No samples, of features of this width."""
        return cls(torch.empty(0, width), torch.empty(0, dtype=torch.int64))

    def add(self, features: Tensor, labels: Tensor) -> HeldOut:
        """With more samples, ``features: [m, d]`` with ``labels: [m]``; classes that have too many are thinned out."""
        features = torch.cat([self.features, features.float().cpu()])
        labels = torch.cat([self.labels, labels.cpu()])
        rows = [_spread(own) for own in _by_class(labels)]
        keep = torch.cat(rows) if rows else labels
        return HeldOut(features[keep], labels[keep])  # in the order of classes, whatever the order of teaching

    def without(self, label: int) -> HeldOut:
        """Without a class: the labels above it move down by one."""
        keep = self.labels != label
        labels = self.labels[keep]
        return HeldOut(self.features[keep], labels - (labels > label).long())

    def after_task(self, head: Head, features: Tensor, labels: Tensor) -> HeldOut:
        """After a task has ended: with its held-out samples, ``features: [m, d]`` of the model now, ``labels: [m]``.

        The samples of earlier tasks are moved as the head estimates that the task moved their features.
        """
        device = head.context.device
        moved = head.moved(self.features.to(device), self.labels.to(device)).float().cpu()
        return HeldOut(moved, self.labels).add(head.transformed(features), labels)

    def state_dict(self) -> dict[str, Tensor]:
        """The features of each class by its label: a class that is taught leaves the tensors of others as they are."""
        found = self.labels.bincount().nonzero().flatten().tolist()
        return {str(label): self.features[self.labels == label] for label in found}

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> HeldOut:
        """Restore a :meth:`state_dict`, in the order of classes that :meth:`add` keeps."""
        labels = sorted(state, key=int)
        counts = torch.tensor([len(state[label]) for label in labels])
        return cls(
            torch.cat([state[label] for label in labels]),
            torch.tensor(list(map(int, labels))).repeat_interleave(counts),
        )


@dataclass(frozen=True)
class Calibration:
    """How logits become probabilities, and from where on a sample is unlike every class.

    Attributes:
        temperature: that logits are divided by before the softmax.
        thresholds: float64 [K], of the squared distance to each class; where there are no distances [1], of the
            probability that the predicted class is wrong.
    """

    temperature: float
    thresholds: Tensor

    @classmethod
    def fit(
        cls, logits: Tensor, labels: Tensor, own: tuple[Tensor, Tensor] | None, unknown: float = 0.05
    ) -> Calibration:
        """Set temperature and thresholds on held-out samples.

        Args:
            logits: [m, K] by a head that was not fitted to these samples; ``-inf`` for classes without samples.
            labels: [m].
            own: squared distances ``[n]`` of samples to their own classes, each left out of the fit, and these classes
                ``[n]``; None if the head measures no distances.
            unknown: the share of a class's own samples that may be called unknown.
        """
        usable = logits.gather(1, labels[:, None])[:, 0].isfinite()
        logits, labels = logits[usable].detach().double().cpu(), labels[usable].cpu()
        temperature = _temperature(logits, labels)
        if own is not None:
            distances, classes = own[0].detach().double().cpu(), own[1].cpu()
            there = distances.isfinite()
            return cls(temperature, _thresholds(distances[there], classes[there], logits.shape[1], unknown))
        wrong = 1 - (logits / temperature).softmax(dim=1).amax(dim=1)
        return cls(temperature, _quantile(wrong, unknown)[None])

    def probabilities(self, logits: Tensor) -> Tensor:
        """``logits: [b, K]`` to probabilities, float64 [b, K]."""
        return (logits.double() / self.temperature).softmax(dim=1)

    def unlikeness(self, logits: Tensor, distances: Tensor | None) -> Tensor:
        """How unlike every class each sample is, float64 [b]: above 1 it is unknown.

        The least distance to a class, divided by the threshold of that class. So a class's own samples are called
        unknown as seldom as its threshold says, whether their class is predicted or another one.
        """
        thresholds = self.thresholds.to(logits.device)
        if distances is None:
            found: Tensor = 1 - self.probabilities(logits).amax(dim=1)
            return found / thresholds.clamp(min=torch.finfo(torch.float64).tiny)
        ratios = distances.double() / thresholds.to(distances.device)
        return ratios.nan_to_num(nan=torch.inf).amin(dim=1)  # inf / inf: a class without samples, nothing to set it on

    def known(self, logits: Tensor, distances: Tensor | None) -> Tensor:
        """Which samples are like some class: bool [b]."""
        return self.unlikeness(logits, distances) <= 1

    def state_dict(self) -> dict[str, Any]:
        """``Calibration(**state)`` restores it."""
        return {"temperature": self.temperature, "thresholds": self.thresholds}


@torch.no_grad()
def held_out_scores(head: Head, held: HeldOut, among: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits ``[m, K]`` and distances ``[m, K]`` of samples by a head that was fitted to none of them, and their rows.

    Only of samples of the classes ``among``, where given: all samples against all classes take time that grows with the
    square of the number of classes.
    """
    left, rows = _left_out(head, held)
    if among is not None:
        rows = rows[torch.isin(held.labels[rows], among)]
    features = held.features[rows]
    return logits_by(left, features), left.distances(features.to(head.context.device)), rows


@torch.no_grad()
def calibrate(head: Head, held: HeldOut, unknown: float = 0.05) -> Calibration:
    """The calibration that follows from a head and the kept samples; the head does not change."""
    device = head.context.device
    left, rows = _left_out(head, held)
    rows = _spread(rows, _ENOUGH)
    distances = head.left_out_distances(held.features.to(device), held.labels.to(device))
    own = None if distances is None else (distances, held.labels)
    return Calibration.fit(logits_by(left, held.features[rows]), held.labels[rows].to(device), own, unknown)


def _left_out(head: Head, held: HeldOut) -> tuple[Head, Tensor]:
    """The head as it would be without some of the kept samples, and which: up to a fifth of each class.

    A fitted head may have been fitted to all samples: some are removed from its statistics, exactly, and the head that
    follows from the rest is returned. The classifier of a trained head was trained without any of them.
    """
    rows = torch.arange(len(held.labels))
    if not isinstance(head, StatisticalHead):
        return head, rows
    count = head.statistics[0].count.long().tolist()
    chosen = [_spread(own, max(1, count[label] // _EVERY)) for label, own in enumerate(_by_class(held.labels))]
    rows = torch.cat(chosen) if chosen else rows
    return head.leaving_out(held.features[rows], held.labels[rows]), rows


def logits_by(head: Head, features: Tensor) -> Tensor:
    """Logits ``[m, K]`` of ``features: [m, d]``, transformed as the head takes them."""
    if isinstance(head, FittedHead):
        module, features = head.fitted_module, features.to(head.context.device)
    else:
        module = output_layer(unwrap(head.context.module))
        features = features.to(next(head.context.module.parameters()))
    logits: Tensor = module(features)
    return logits


def _temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature with the least negative log-likelihood of ``logits: [m, K]``, float64.

    The likelihood is convex in ``β = 1/T``, so its slope is bisected. Where all samples are right it would grow without
    end as T falls; so the target gives the strongest wrong class ``1 / (m + 2)``, as the rule of succession does to
    what was never seen in m trials: five right answers of five do not make a classifier certain.
    """
    seen = logits.isfinite().all(dim=0)
    if len(labels) == 0 or int(seen.sum()) < 2:
        return 1.0
    z = logits - logits.amax(dim=1, keepdim=True)
    other = z.scatter(1, labels[:, None], -torch.inf).argmax(dim=1)
    share = 1 / (len(labels) + 2)
    target = (1 - share) * z.gather(1, labels[:, None])[:, 0] + share * z.gather(1, other[:, None])[:, 0]
    z = z[:, seen]
    scale = float(z.std()) or 1.0  # log densities reach thousands, cosines 1
    low, high = math.log(1e-4 / scale), math.log(1e4 / scale)
    for _ in range(60):
        middle = (low + high) / 2
        expected = ((z * math.exp(middle)).softmax(dim=1) * z).sum(dim=1)
        low, high = (middle, high) if float((expected - target).mean()) < 0 else (low, middle)
    return math.exp(-low)


def _thresholds(own: Tensor, labels: Tensor, num_classes: int, unknown: float) -> Tensor:
    """Thresholds ``[K]`` from the distances ``own: [m]`` of samples to their own classes, each left out of the fit.

    A quantile 1 - u of fewer than 1/u samples is no more than their maximum, so classes share the shape of the tail and
    differ in scale. With n samples of class c, mean distance m_c over them and m over all classes,

        threshold_c = s_c q,    s_c = (n m_c + 16 m) / (n + 16),

    where q is the quantile of all distances, each divided by the scale of its class as it would be without that sample:
    a new sample has no part in it either.
    """
    if len(own) == 0:
        return torch.full((num_classes,), torch.inf, dtype=torch.float64)
    counts = labels.bincount(minlength=num_classes) + _PRIOR
    sums = torch.full((num_classes,), _PRIOR * float(own.mean()), dtype=torch.float64).index_add_(0, labels, own)
    others = (sums[labels] - own) / (counts[labels] - 1)
    return sums / counts * _quantile(own / others.clamp(min=torch.finfo(torch.float64).tiny), unknown)


def _quantile(values: Tensor, unknown: float) -> Tensor:
    """The value that a new sample of the same kind exceeds with probability ``unknown`` at most, where n allows it.

    The ``⌈(n + 1)(1 - u)⌉``-th smallest of ``values: [n]``, the largest where that is more than n; inf without values.
    """
    if len(values) == 0:
        return torch.tensor(torch.inf, dtype=torch.float64)
    rank = min(len(values), math.ceil((len(values) + 1) * (1 - unknown)))
    return values.sort().values[rank - 1]


class Shift(NamedTuple):
    """How unlike new data is to what was taught.

    Attributes:
        p_value: how likely a difference at least this large is between two halves of the same data.
        statistic: the Kolmogorov-Smirnov statistic: the largest gap between the two distribution functions, 0 to 1.
        sentence: what this means.
    """

    p_value: float
    statistic: float
    sentence: str


def shift(held_out_distances: Tensor, new_distances: Tensor) -> Shift:
    """Compare new samples with held-out samples of what was taught by their distance to the nearest class.

    The two-sample Kolmogorov-Smirnov test, as in Renate's detectors; exact up to 10,000 samples of either kind.

    Args:
        held_out_distances: [m, K] distances to all classes, or [m] to the nearest.
        new_distances: [n, K] or [n], likewise.
    """
    old, new = (_nearest(distances) for distances in (held_out_distances, new_distances))
    if not len(old) or not len(new):
        raise DataError("there is nothing to compare: give at least one new sample, and hold out some when teaching")
    test = require("scipy.stats", install="pip install 'infssm[bench]'").ks_2samp(old, new)
    statistic, p_value = float(test.statistic), float(test.pvalue)
    middle = [float(np.median(part)) for part in (old, new)]
    figures = (
        f"median distance to the nearest class {middle[1]:.3g}, held-out samples {middle[0]:.3g}; p = {p_value:.2g}"
    )
    # Samples that do not overlap at all lie in one of two orders, old first or new first, of all that are possible.
    if 2 / math.comb(len(old) + len(new), len(new)) >= 0.05:
        sentence = (
            f"{len(new)} new and {len(old)} held-out samples are too few to tell whether they differ ({figures})."
        )
    elif p_value >= 0.05:
        sentence = f"The {len(new)} new samples look like what was taught ({figures})."
    elif middle[1] >= middle[0]:
        sure = "are unlike" if p_value < 0.01 else "may be unlike"
        sentence = f"The {len(new)} new samples {sure} what was taught: they are further from every class ({figures})."
    else:
        sentence = (
            f"The {len(new)} new samples are closer to the classes than held-out ones ({figures}): they vary less, or "
            "were taught already."
        )
    return Shift(p_value, statistic, sentence)


def _nearest(distances: Tensor) -> NDArray[np.float64]:
    """Distances to the nearest class."""
    nearest = distances.amin(dim=1) if distances.ndim == 2 and len(distances) else distances.flatten()
    found: NDArray[np.float64] = nearest.double().cpu().numpy()
    return found
