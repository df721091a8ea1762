"""What fitted heads keep of a class: number, mean and covariance of its features, computed from sums, never an image.

Memory: ``K · d`` for the means and ``d²`` for a shared covariance, ``K · d²`` for one per class (float64; class
covariances float32). 100 classes of width 96 take 3.5 MiB, of width 384 56 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infssm._processes import sum_over_processes
from infssm.errors import ConfigError


@dataclass
class ClassStatistics:
    """Statistics of K classes; a class without images has count 0.

    Attributes:
        count: float64 [K] images of each class.
        mean: float64 [K, d].
        pooled: float64 [d, d], within-class covariance over all images (divided by their number).
        covariance: float32 [K, d, d], of each class (divided by its number), or ``None`` where only pooled is kept.
    """

    count: Tensor
    mean: Tensor
    pooled: Tensor
    covariance: Tensor | None

    @property
    def seen(self) -> Tensor:
        """Classes with images: bool [K]."""
        return self.count > 0

    def replaced(self, fresh: ClassStatistics) -> ClassStatistics:
        """Replace the classes that ``fresh`` has; the others stay."""
        other = fresh.seen
        stay = self.count.masked_fill(other, 0).sum()
        total = stay + fresh.count.sum()
        covariance = self.covariance
        if covariance is not None and fresh.covariance is not None:
            covariance = torch.where(other[:, None, None], fresh.covariance, covariance)
        return ClassStatistics(
            torch.where(other, fresh.count, self.count),
            torch.where(other[:, None], fresh.mean, self.mean),
            (stay * self.pooled + fresh.count.sum() * fresh.pooled) / total.clamp(min=1),
            covariance,
        )

    def moved(self, matrix: Tensor, shift: Tensor) -> ClassStatistics:
        """After features ``f: [d]`` became ``f @ matrix + shift``; ``matrix: [d, d]``, ``shift: [d]`` or ``[K, d]``."""
        covariance = self.covariance
        if covariance is not None:
            moved = torch.empty_like(covariance)
            for index in range(len(covariance)):  # one class at a time: no second float64 copy of them all
                moved[index] = matrix.T @ covariance[index].double() @ matrix
            covariance = moved
        return ClassStatistics(
            self.count,
            torch.where(self.seen[:, None], self.mean @ matrix + shift, self.mean),
            matrix.T @ self.pooled @ matrix,
            covariance,
        )

    def to(self, device: torch.device) -> ClassStatistics:
        """The statistics on a device."""
        covariance = None if self.covariance is None else self.covariance.to(device)
        return ClassStatistics(self.count.to(device), self.mean.to(device), self.pooled.to(device), covariance)

    def state_dict(self) -> dict[str, Any]:
        """All tensors by name: ``ClassStatistics(**state)`` restores them."""
        return {name: getattr(self, name) for name in ("count", "mean", "pooled", "covariance")}


class StatisticsSums:
    """Sums over images from which :class:`ClassStatistics` follow; sums of processes add up.

    Args:
        num_classes: K.
        width: d.
        per_class: keep a covariance per class; memory is allocated for the classes that have images.
        device: of the sums.
    """

    def __init__(self, num_classes: int, width: int, *, per_class: bool, device: torch.device | str = "cpu") -> None:
        self.per_class = per_class
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._count = torch.zeros(num_classes, **options)
        self._total = torch.zeros(num_classes, width, **options)
        self._outer = torch.zeros(width, width, **options)
        self._outers: dict[int, Tensor] = {}

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add ``features: [b, d]`` with ``labels: [b]``."""
        x = features.double()
        self._count.index_add_(0, labels, torch.ones_like(labels, dtype=torch.float64))
        self._total.index_add_(0, labels, x)
        if not self.per_class:
            self._outer.addmm_(x.T, x)
            return
        for label in labels.bincount().nonzero().flatten().tolist():
            rows = x[labels == label]
            self._outers.setdefault(label, torch.zeros_like(self._outer)).addmm_(rows.T, rows)

    def statistics(self) -> ClassStatistics:
        """Counts, means and covariances of the images that all processes added."""
        count, total, outer = sum_over_processes([self._count, self._total, self._outer])
        number, images = count.clamp(min=1), count.sum().clamp(min=1)
        mean = total / number[:, None]
        if not self.per_class:
            return ClassStatistics(count, mean, (outer - (count[:, None] * mean).T @ mean) / images, None)
        pooled = torch.zeros_like(outer)
        covariance = outer.new_zeros(len(count), *outer.shape, dtype=torch.float32)
        for label in count.nonzero().flatten().tolist():  # the same on every process, whoever has its images
            own = sum_over_processes([self._outers.get(label, torch.zeros_like(outer))])[0]
            own = own / number[label] - torch.outer(mean[label], mean[label])
            pooled += count[label] / images * own
            covariance[label] = own
        return ClassStatistics(count, mean, pooled, covariance)


def shrunk(covariance: Tensor, alpha: float) -> Tensor:
    """``(1 - α)Σ + α·mean(diag Σ)·I`` of ``covariance: [..., d, d]``: invertible for every α > 0 and Σ ≠ 0."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    # Features that do not vary at all (one image, a constant channel) still get a distance.
    scale = torch.where(diagonal > 0, alpha * diagonal, torch.ones_like(diagonal))
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return (1 - alpha) * covariance + scale[..., None, None] * eye


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of a symmetric ``matrix: [d, d]``; raises with advice where there is none."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(torch.isfinite(factor).all()):
        raise ConfigError("the covariance of the features is singular or not finite: raise alpha, or lower train.lr")
    lower: Tensor = factor
    return lower
