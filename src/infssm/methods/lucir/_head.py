"""LUCIR's cosine classifier and its losses."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CosineHead(nn.Module):
    """Scores ``eta · cos(feature, w_c)``: no bias, one block of weights per task, one learned scale.

    Only the block of the task in training has gradients; the others keep their weights.
    """

    def __init__(self, num_features: int, blocks: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(size, num_features)) for size in blocks)
        self.eta = nn.Parameter(torch.ones(1))
        for block in range(len(blocks)):
            self.reset(block)
        self.train_block(0)

    @property
    def in_features(self) -> int:
        """Width of the features."""
        return int(self.weights[0].shape[1])

    @property
    def out_features(self) -> int:
        """Number of classes."""
        return sum(len(block) for block in self.weights)

    @torch.no_grad()
    def reset(self, block: int) -> None:
        """Draw the weights of a block anew, uniform in ``±1/sqrt(features)``."""
        bound = 1 / math.sqrt(self.weights[block].shape[1])
        self.weights[block].uniform_(-bound, bound)

    def train_block(self, block: int) -> None:
        """Give gradients to one block and to the scale alone."""
        for index, weights in enumerate(self.weights):
            weights.requires_grad_(index == block)

    def cosines(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to cosines with all classes, ``[b, K]``."""
        directions = torch.cat([F.normalize(block, dim=1) for block in self.weights])
        return F.linear(F.normalize(features, dim=1), directions)

    def forward(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to scores ``[b, K]``."""
        return self.eta * self.cosines(features)


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
