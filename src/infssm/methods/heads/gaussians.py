"""Gaussian classes: log densities of features, and how far a feature is from each class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from infssm.methods.heads.class_statistics import ClassStatistics, cholesky, shrunk

_ROUNDING = 1e-9
"""Least share of a distance that is taken for more than rounding, where only one feature varies in its direction."""


class Gaussians(nn.Module):
    """Scores ``offset_c - ½|whiten_c (f - mean_c)|²``: log densities of class Gaussians up to a constant.

    mean: [K, d], whiten: [K, d, d] or [1, d, d] for all, offset: [K]. Of features of m models side by side, each with
    a covariance of its own: mean: [K, m·d], whiten: [K, m·d, d], one model below the other.
    """

    mean: Tensor
    whiten: Tensor
    offset: Tensor

    def __init__(self, mean: Tensor, whiten: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("whiten", whiten)
        self.register_buffer("offset", offset)

    def forward(self, features: Tensor) -> Tensor:
        """``features: [b, m·d]`` to scores ``[b, K]``."""
        return self.offset - 0.5 * self.distances(features)

    def distances(self, features: Tensor) -> Tensor:
        """``features: [b, m·d]`` to squared Mahalanobis distances ``[b, K]``, of several models their mean.

        Some classes at a time: never more than 64 MiB in between.
        """
        count = len(self.mean)
        # An exported program must work for any number of images.
        if features.numel() and not torch.compiler.is_compiling():
            count = max(1, 2**24 // features.numel())
        width = self.whiten.shape[2]
        distances: list[Tensor] = []
        for start in range(0, self.mean.shape[1], width):  # one model after the other
            model = slice(start, start + width)
            whiten = self.whiten[:, model].expand(len(self.mean), -1, -1)
            parts = []
            for first in range(0, len(self.mean), count):
                part = slice(first, first + count)
                parts.append(
                    ((features[:, model] - self.mean[part, None, model]) @ whiten[part].mT).square().sum(dim=2)
                )
            distances.append(torch.cat(parts))
        # `average_over_models` has divided the whitening by sqrt(m), so this sum is the mean.
        return torch.stack(distances).sum(dim=0).T


class Mixtures(Gaussians):
    """Classes of several Gaussians: log densities of their mixtures up to a constant.

    members: int64 [K, n], the Gaussians of every class by their number, M where a class has fewer than n; mean, whiten
    and offset as of :class:`Gaussians`, of M Gaussians. The offsets hold the logarithms of their shares of the class.
    """

    members: Tensor

    def __init__(self, mean: Tensor, whiten: Tensor, offset: Tensor, members: Tensor) -> None:
        super().__init__(mean, whiten, offset)
        self.register_buffer("members", members)

    def forward(self, features: Tensor) -> Tensor:
        """``features: [b, m·d]`` to scores ``[b, K]``."""
        scores = self.offset - 0.5 * super().distances(features)
        return self._by_class(scores, -torch.inf).logsumexp(dim=2)

    def distances(self, features: Tensor) -> Tensor:
        """Squared Mahalanobis distances ``[b, K]`` to the nearest Gaussian of each class; ``inf`` for a class of none.

        ``features: [b, m·d]``.
        """
        return self.member_distances(features).amin(dim=2)

    def member_distances(self, features: Tensor) -> Tensor:
        """The same to each Gaussian of the class: ``[b, K, n]``, ``inf`` for missing ones."""
        return self._by_class(super().distances(features), torch.inf)

    def _by_class(self, values: Tensor, missing: float) -> Tensor:
        return torch.nn.functional.pad(values, (0, 1), value=missing)[:, self.members]


def gaussian_classifier(statistics: ClassStatistics, alpha: float, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quadratic discriminant analysis with equal priors and class covariances ``(1-β)Σ_c + βΣ̄``, shrunk by α.

    Returns ``mean: [K, d]``, ``whiten: [K, d, d]`` (``[1, d, d]`` where the pooled covariance alone is kept, or used
    because β is 1) and ``offset: [K]``; the score of class c is ``offset_c - ½|whiten_c (f - mean_c)|²``.
    """
    pooled = statistics.pooled
    if statistics.triangles is None or beta == 1:
        whiten, offset = _whitening(shrunk(pooled, alpha))
        whiten, offset = whiten[None], offset.expand(len(statistics.count))
    else:
        whiten = torch.zeros(len(statistics.count), *pooled.shape, device=pooled.device)
        offset = torch.zeros_like(statistics.count)
        for label in statistics.seen.nonzero().flatten().tolist():  # one at a time, float64 for one class only
            own = (1 - beta) * statistics.covariance(label) + beta * pooled
            whiten[label], offset[label] = _whitening(shrunk(own, alpha))
    return statistics.mean, whiten, offset.masked_fill(~statistics.seen, -torch.inf)


def left_out_distances(
    statistics: ClassStatistics, features: Tensor, labels: Tensor, alpha: float, beta: float
) -> Tensor:
    """Squared distances ``[m]`` of ``features: [m, d]`` to their classes ``labels: [m]``, each left out of the fit.

    The features are some of those that the statistics are of. With n of them in class c, N in all and δ = f - μ_c, the
    mean without f is further away by the factor n / (n-1), and S, the covariance of :func:`gaussian_classifier`, loses
    the share of f, ``w δδᵀ`` with ``w = (1-α)((1-β) / (n-1) + β n / ((n-1)N))``. By Sherman and Morrison the distance
    is then ``(n / (n-1))² q / (1 - wq)`` with ``q = δᵀS⁻¹δ``: no feature needs a covariance of its own. What S is
    divided by and its share of the identity stay, because the distances are compared with those by S. ``inf`` where the
    class has no other feature.
    """
    beta = 1.0 if statistics.triangles is None else beta
    pooled, total = statistics.pooled, statistics.count.sum()
    factor = cholesky(shrunk(pooled, alpha))
    distances = torch.full((len(features),), torch.inf, dtype=torch.float64, device=features.device)
    for label, rows in enumerate(torch.split(labels.argsort(stable=True), labels.bincount().tolist())):
        count = statistics.count[label]
        if not len(rows) or count < 2:
            continue
        if beta < 1:
            factor = cholesky(shrunk((1 - beta) * statistics.covariance(label) + beta * pooled, alpha))
        gaps = (features[rows].double() - statistics.mean[label]).T
        within = torch.linalg.solve_triangular(factor, gaps, upper=False).square().sum(dim=0)
        weight = (1 - alpha) * (1 - beta + beta * count / total) / (count - 1)
        rest = (1 - weight * within).clamp(min=_ROUNDING)
        distances[rows] = (count / (count - 1)) ** 2 * within / rest
    return distances


def average_over_models(
    models: Sequence[ClassStatistics], alpha: float, beta: float, log_prior: Tensor | float = 0.0
) -> Gaussians:
    """One classifier whose scores are the mean over models of their :func:`gaussian_classifier`, and the prior's.

    Features of the models stand side by side: ``mean: [K, m·d]``, ``whiten: [K, m·d, d]`` (or ``[1, m·d, d]``) one
    model below the other, ``offset: [K]``. Across models features are taken to be independent.
    """
    means, whitens, offsets = zip(*(gaussian_classifier(one, alpha, beta) for one in models), strict=True)
    whiten = torch.cat(whitens, dim=1) / len(models) ** 0.5
    return Gaussians(torch.cat(means, dim=1), whiten, torch.stack(offsets).mean(dim=0) + log_prior)


def _whitening(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """``L⁻¹`` and ``-½ log det`` of ``covariance = LLᵀ: [d, d]``."""
    factor = cholesky(covariance)
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye, upper=False), -factor.diagonal().log().sum()
