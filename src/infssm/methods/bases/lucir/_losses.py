"""LUCIR's losses, where the weights of new classes start, and which images of a class are kept."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


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
