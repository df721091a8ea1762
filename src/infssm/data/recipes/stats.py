"""Channel statistics by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stats:
    """Mean and standard deviation per channel, of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalize(self, raw: Tensor) -> Tensor:
        """uint8 or float [n, channels or 1, h, w] in 0..255 to normalised float32 [n, channels, h, w]."""
        mean = torch.tensor(self.mean, dtype=torch.float32).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float32).view(-1, 1, 1)
        x = raw.expand(-1, len(self.mean), -1, -1).to(torch.float32, copy=True)
        return x.mul_(1 / (255 * std)).sub_(mean / std)


IMAGENET = Stats((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = Stats((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
DIGITS = Stats((0.3053,), (0.3761,))


def default_stats(dataset: str, channels: int) -> Stats:
    """Statistics a data set is normalised with unless a recipe says otherwise."""
    known = {"cifar100": CIFAR100, "digits": DIGITS}
    return known.get(dataset) or (IMAGENET if channels == 3 else Stats((0.5,), (0.5,)))
