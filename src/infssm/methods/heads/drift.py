"""How features of old classes moved while a task was learned, estimated from the task's own images.

The models before and after the task are run on the same images: ``x`` old, ``x + r`` new features. The motion of
old classes is inferred from these, by a linear map (``map``) or by the mean motion nearby (``mean``):
``statistics.transformed_by(*drift.solve())``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from infssm._processes import sum_over_processes
from infssm.methods.heads.class_statistics import ClassStatistics

Drift = Literal["map", "mean", "none"]


class MapDrift:
    """A ridge map from old to new features: ``f -> f @ (I + D) + b``.

    ``D = (XᵀX/n + λ·mean(diag(XᵀX/n))·I)⁻¹ Xᵀ(R - R̄)/n`` with X centred: without evidence nothing moves.
    """

    def __init__(self, width: int, ridge: float, device: torch.device | str = "cpu") -> None:
        self.ridge = ridge
        # Sums of [1, x]ᵀ[x, r]: everything the map follows from, whatever the number of images.
        self._sums = torch.zeros(width + 1, 2 * width, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, old: Tensor, new: Tensor) -> None:
        """Add features ``old: [b, d]`` and ``new: [b, d]`` of the same images."""
        x = old.double()
        both = torch.cat([x, new.double() - x], dim=1)
        self._sums.addmm_(torch.cat([torch.ones_like(x[:, :1]), x], dim=1).T, both)
        self._count += len(x)

    def solve(self) -> tuple[Tensor, Tensor]:
        """``matrix: [d, d]`` and ``shift: [d]`` of the map, over all processes."""
        sums, count = sum_over_processes([self._sums, self._count])
        width = sums.shape[1] // 2
        sums = sums / count
        mean_x, mean_r, second, cross = sums[0, :width], sums[0, width:], sums[1:, :width], sums[1:, width:]
        floor = 1e-12 * (1 + second.diagonal().mean())  # without variation nothing is known, and the map is a shift
        second = second - torch.outer(mean_x, mean_x)
        cross = cross - torch.outer(mean_x, mean_r)
        eye = torch.eye(width, dtype=torch.float64, device=sums.device)
        scale = torch.maximum(second.diagonal().mean(), floor)
        change = torch.linalg.solve(second + self.ridge * scale * eye, cross)
        return eye + change, mean_r - mean_x @ change


class MeanDrift:
    """Semantic drift compensation (Yu et al. 2020): each old mean moves with the images near it.

    ``μ_c += Σ_i w_i r_i / Σ_i w_i``, ``w_i = exp(-|x_i - μ_c|² / 2σ²)`` with σ² the trace of the pooled covariance.
    """

    def __init__(self, statistics: ClassStatistics) -> None:
        self._means = statistics.mean
        self._variance = statistics.pooled.trace().clamp(min=torch.finfo(torch.float64).tiny)
        self._weight = torch.zeros_like(statistics.count)
        self._motion = torch.zeros_like(statistics.mean)

    def add(self, old: Tensor, new: Tensor) -> None:
        """Add features ``old: [b, d]`` and ``new: [b, d]`` of the same images."""
        x = old.double()
        weight = torch.exp(-torch.cdist(self._means, x).square() / (2 * self._variance))
        self._weight += weight.sum(dim=1)
        self._motion += weight @ (new.double() - x)

    def solve(self) -> tuple[Tensor, Tensor]:
        """The identity, and the shift of each class, ``[K, d]``, over all processes: covariances stay."""
        weight, motion = sum_over_processes([self._weight, self._motion])
        # Where no image is near (weights underflow) the class stays.
        return torch.eye(motion.shape[1]).to(motion), motion / weight.clamp(min=1e-300)[:, None]
