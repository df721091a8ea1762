"""Statistics of a class that fitted heads keep: number, mean and covariance of its features, never an image.

Memory: ``K · d`` numbers for the means and one triangle of ``d (d + 1) / 2`` for the covariance of each class that has
images, all float64. 100 classes of width 96 take 3.6 MiB, of width 384 57 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infssm._processes import sum_over_processes
from infssm.errors import ConfigError


@dataclass
class ClassStatistics:
    """Statistics of K classes; a class without images has count 0.

    The pooled covariance follows from those of the classes, added in their order, and is not stored beside them: what
    remains when a class is removed is bit for bit what there would be had the class never been there.

    Attributes:
        count: float64 [K] images of each class.
        mean: float64 [K, d].
        triangles: float64 [d (d + 1) / 2] for each class, the lower triangle of its covariance (divided by its number);
            without elements where the class has no images. ``None`` if only the pooled covariance is kept.
        shared: float64 [d, d], the pooled covariance, if only this one is kept.
    """

    count: Tensor
    mean: Tensor
    triangles: list[Tensor] | None
    shared: Tensor | None = None

    @property
    def seen(self) -> Tensor:
        """Classes with images: bool [K]."""
        return self.count != 0

    @property
    def pooled(self) -> Tensor:
        """Within-class covariance over all images (divided by their number): float64 [d, d]."""
        if self.triangles is None:
            assert self.shared is not None
            return self.shared
        width = self.mean.shape[1]
        total = self.mean.new_zeros(width * (width + 1) // 2)
        for weight, triangle in zip((self.count / _at_least_1(self.count.sum())).tolist(), self.triangles, strict=True):
            if weight:
                total.add_(triangle, alpha=weight)
        return symmetric(total, width)

    def covariance(self, label: int) -> Tensor:
        """Covariance of one class with images: float64 [d, d]."""
        assert self.triangles is not None
        return symmetric(self.triangles[label], self.mean.shape[1])

    def merged(self, fresh: ClassStatistics) -> ClassStatistics:
        """Statistics of the images of both (Chan et al. 1979): more images of known classes, new classes, or both.

        ``n = n₁ + n₂``, ``μ = μ₁ + (n₂/n)δ``, ``Σ = Σ₁ + (n₂/n)(Σ₂ - Σ₁) + (n₁n₂/n²)δδᵀ`` with ``δ = μ₂ - μ₁``: a class
        that only one of them has stays as it is to the last bit. With negative counts in ``fresh`` images are removed.
        """
        count = self.count + fresh.count
        weight = fresh.count / torch.where(count == 0, torch.inf, count)  # 0 where no images remain
        between = weight * (1 - weight)
        gap = fresh.mean - self.mean
        mean = (self.mean + weight[:, None] * gap).masked_fill(count[:, None] == 0, 0)
        if self.triangles is None or fresh.triangles is None:
            parts = self.count.sum() * self.pooled + fresh.count.sum() * fresh.pooled
            shared = (parts + (count * between * gap.T) @ gap) / _at_least_1(count.sum())
            return ClassStatistics(count, mean, None, shared)
        triangles = list(self.triangles)
        for label in fresh.seen.nonzero().flatten().tolist():
            own, other = self.triangles[label], fresh.triangles[label]
            if not own.numel():
                triangles[label] = other
            elif count[label] == 0:
                triangles[label] = own.new_empty(0)
            elif count[label] == 1:  # removal leaves rounding errors instead of 0, of either sign
                triangles[label] = torch.zeros_like(own)
            else:
                spread = lower_triangle(torch.outer(gap[label], gap[label]))
                triangles[label] = own + weight[label] * (other - own) + between[label] * spread
        return ClassStatistics(count, mean, triangles)

    def removed(self, images: ClassStatistics) -> ClassStatistics:
        """Statistics without some of the images they were taken of."""
        return self.merged(ClassStatistics(-images.count, images.mean, images.triangles, images.shared))

    def resized(self, num_classes: int) -> ClassStatistics:
        """Append classes without images, up to ``num_classes`` in all."""
        more = num_classes - len(self.count)
        if more < 0:
            raise ConfigError(f"these are statistics of {len(self.count)} classes, and the head has {num_classes}")
        triangles = self.triangles
        if triangles is not None:
            triangles = [*triangles, *(self.count.new_empty(0) for _ in range(more))]
        count, mean = torch.cat([self.count, self.count.new_zeros(more)]), self.mean
        return ClassStatistics(count, torch.cat([mean, mean.new_zeros(more, mean.shape[1])]), triangles, self.shared)

    def without(self, label: int) -> ClassStatistics:
        """Without a class: the labels above it move down by one."""
        if self.triangles is None:
            raise ConfigError(
                "a class cannot be forgotten if only the shared covariance of all classes is kept: their own "
                "covariances take more than 256 MiB. Use narrower features, or teach a new model the other classes"
            )
        stay = [k for k in range(len(self.count)) if k != label]
        return ClassStatistics(self.count[stay], self.mean[stay], [self.triangles[k] for k in stay])

    def transformed_by(self, matrix: Tensor, shift: Tensor) -> ClassStatistics:
        """After features ``f: [d]`` became ``f @ matrix + shift``; ``matrix: [d, d]``, ``shift: [d]`` or ``[K, d]``."""
        triangles, shared = self.triangles, self.shared
        if triangles is not None:
            triangles = [
                lower_triangle(matrix.T @ self.covariance(label) @ matrix) if triangle.numel() else triangle
                for label, triangle in enumerate(triangles)
            ]
        if shared is not None:
            shared = matrix.T @ shared @ matrix
        mean = torch.where(self.seen[:, None], self.mean @ matrix + shift, self.mean)
        return ClassStatistics(self.count, mean, triangles, shared)

    def to(self, device: torch.device) -> ClassStatistics:
        """The statistics on a device."""
        triangles = None if self.triangles is None else [triangle.to(device) for triangle in self.triangles]
        shared = None if self.shared is None else self.shared.to(device)
        return ClassStatistics(self.count.to(device), self.mean.to(device), triangles, shared)

    def state_dict(self) -> dict[str, Any]:
        """All tensors by name; of each class with images one of its own, mean and covariance, that others leave alone.

        So a store that keeps equal tensors once grows with the classes that are taught, not with those that are known.
        """
        if self.triangles is None:
            return {"count": self.count, "mean": self.mean, "shared": self.shared}
        pairs = enumerate(zip(self.mean, self.triangles, strict=True))
        classes = {str(label): torch.cat([mean, triangle]) for label, (mean, triangle) in pairs if triangle.numel()}
        return {"count": self.count, "width": self.mean.shape[1], "classes": classes}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ClassStatistics:
        """Restore a :meth:`state_dict`."""
        count = state["count"]
        if "shared" in state:
            return cls(count, state["mean"], None, state["shared"])
        mean, triangles = count.new_zeros(len(count), state["width"]), [count.new_empty(0) for _ in count]
        for key, stored in state["classes"].items():
            mean[int(key)], triangles[int(key)] = stored[: state["width"]], stored[state["width"] :]
        return cls(count, mean, triangles)


class StatisticsSums:
    """Sums over images from which :class:`ClassStatistics` follow; sums of processes add up.

    Args:
        num_classes: K.
        width: d.
        per_class: keep a covariance per class; memory is allocated for the classes that have images.
        device: device of the sums.
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

    def statistics(
        self, add_up: Callable[[Sequence[Tensor]], Sequence[Tensor]] = sum_over_processes
    ) -> ClassStatistics:
        """Counts, means and covariances of the images that all processes added; ``add_up=list``: that this one did."""
        count, total, outer = add_up([self._count, self._total, self._outer])
        mean = total / _at_least_1(count)[:, None]
        if not self.per_class:
            shared = (outer - (count[:, None] * mean).T @ mean) / _at_least_1(count.sum())
            return ClassStatistics(count, mean, None, shared)
        triangles = [count.new_empty(0) for _ in count]
        for label in count.nonzero().flatten().tolist():  # the same on every process, whoever has its images
            own = add_up([self._outers.get(label, torch.zeros_like(outer))])[0]
            triangles[label] = lower_triangle(own / count[label] - torch.outer(mean[label], mean[label]))
        return ClassStatistics(count, mean, triangles)


def lower_triangle(matrix: Tensor) -> Tensor:
    """A symmetric ``matrix: [d, d]`` without its upper half: ``[d (d + 1) / 2]``."""
    rows, columns = torch.tril_indices(len(matrix), len(matrix), device=matrix.device)
    return matrix[rows, columns]


def symmetric(triangle: Tensor, width: int) -> Tensor:
    """The matrix ``[d, d]`` of a :func:`lower_triangle`."""
    rows, columns = torch.tril_indices(width, width, device=triangle.device)
    matrix = triangle.new_empty(width, width)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


def _at_least_1(count: Tensor) -> Tensor:
    """Divides sums that are 0 where there are no images."""
    return count.clamp(min=1)


def shrunk(covariance: Tensor, alpha: float) -> Tensor:
    """``(1 - α)Σ + α·mean(diag Σ)·I`` of ``covariance: [..., d, d]``: invertible for every α > 0 and Σ ≠ 0."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    # Features that do not vary at all (one image, a constant channel) still get a distance.
    scale = torch.where(diagonal > 0, alpha * diagonal, torch.ones_like(diagonal))
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return (1 - alpha) * covariance + scale[..., None, None] * eye


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of a symmetric ``matrix: [d, d]``; raises with advice if there is none."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(torch.isfinite(factor).all()):
        raise ConfigError("the covariance of the features is singular or not finite: raise alpha, or lower train.lr")
    lower: Tensor = factor
    return lower
