"""Class-balanced buffers: a quota per class, filled in an order that says which entries to give up last."""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.methods.replay.buffer import Buffer


class BalancedBuffer(Buffer):
    """Entries of a class stay in the order they were added, the most valuable first; trimming keeps the first."""

    def quota(self, num_classes: int) -> int:
        """Entries per class when ``num_classes`` share the buffer."""
        return self.capacity // num_classes

    def trim(self, quota: int) -> None:
        """Keep the first ``quota`` entries of every class; classes come out in ascending order."""
        if len(self) == 0:
            return
        labels = self["label"]
        kept = [torch.nonzero(labels == label).flatten()[:quota] for label in torch.unique(labels)]
        self.reorder(torch.cat(kept))

    def append(self, **rows: Tensor) -> None:
        """Add rows that every process holds already, each field ``[b, ...]``."""
        count = len(rows["label"])
        if len(self) + count > self.capacity:
            raise ConfigError(f"{count} entries do not fit: {len(self)} of {self.capacity} are taken; trim first")
        self.write(torch.arange(len(self), len(self) + count), rows)


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


def spread(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Split ``total`` into shares ``[count]`` that differ by at most one, the larger ones at random places."""
    shares = torch.full((count,), total // count)
    shares[torch.randperm(count, generator=generator)[: total % count]] += 1
    return shares
