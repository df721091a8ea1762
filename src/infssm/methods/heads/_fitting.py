"""From class statistics to classifiers: closed forms in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.methods.heads._statistics import ClassStatistics


def shrunk(covariance: Tensor, alpha: float) -> Tensor:
    """``(1 - α)Σ + α·mean(diag Σ)·I`` of ``covariance: [..., d, d]``: invertible for every α > 0 and Σ ≠ 0."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    # Features that do not vary at all (one image, a constant channel) still get a distance.
    scale = torch.where(diagonal > 0, alpha * diagonal, torch.ones_like(diagonal))
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return (1 - alpha) * covariance + scale[..., None, None] * eye


def lda_classifier(statistics: ClassStatistics, alpha: float) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis with equal priors: ``weight: [K, d]``, ``bias: [K]``.

    Logits ``fᵀS⁻¹μ_c - ½μ_cᵀS⁻¹μ_c`` with S the shrunk pooled covariance; a class without images gets ``-inf``.
    """
    factor = cholesky(shrunk(statistics.pooled, alpha))
    weight = torch.cholesky_solve(statistics.mean.T, factor).T
    bias = -0.5 * (weight * statistics.mean).sum(dim=1)
    return weight, bias.masked_fill(~statistics.seen, -torch.inf)


def gaussian_classifier(statistics: ClassStatistics, alpha: float, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quadratic discriminant analysis with equal priors and class covariances ``(1-β)Σ_c + βΣ̄``, shrunk by α.

    Returns ``mean: [K, d]``, ``whiten: [K, d, d]`` (``[1, d, d]`` where only the pooled covariance is kept) and
    ``offset: [K]``; the score of class c is ``offset_c - ½|whiten_c (f - mean_c)|²``.
    """
    if statistics.covariance is None:
        whiten, offset = _whitening(shrunk(statistics.pooled, alpha))
        whiten, offset = whiten[None], offset.expand(len(statistics.count))
    else:
        whiten = torch.empty_like(statistics.covariance)
        offset = torch.zeros_like(statistics.count)
        for label in statistics.seen.nonzero().flatten().tolist():  # one at a time, float64 for one class only
            own = (1 - beta) * statistics.covariance[label].double() + beta * statistics.pooled
            found, offset[label] = _whitening(shrunk(own, alpha))
            whiten[label] = found
        whiten[~statistics.seen] = 0
    return statistics.mean, whiten, offset.masked_fill(~statistics.seen, -torch.inf)


def averaged(models: Sequence[tuple[Tensor, Tensor, Tensor]], log_prior: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One classifier whose scores are the mean over models of their :func:`gaussian_classifier`, and the prior's.

    Features of the models stand side by side: ``mean: [K, m·d]``, ``whiten: [K, m·d, d]`` (or ``[1, m·d, d]``) one
    model below the other, ``offset: [K]``. Across models features are taken to be independent.
    """
    means, whitens, offsets = zip(*models, strict=True)
    whiten = torch.cat(whitens, dim=1) / len(models) ** 0.5
    return torch.cat(means, dim=1), whiten, torch.stack(offsets).mean(dim=0) + log_prior


def _whitening(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """``L⁻¹`` and ``-½ log det`` of ``covariance = LLᵀ: [d, d]``."""
    factor = cholesky(covariance)
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye, upper=False), -factor.diagonal().log().sum()


def cholesky(matrix: Tensor) -> Tensor:
    """Lower factor of a symmetric ``matrix: [d, d]``; an error that says what to change where there is none."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(torch.isfinite(factor).all()):
        raise ConfigError("the covariance of the features is singular or not finite: raise alpha, or lower train.lr")
    lower: Tensor = factor
    return lower


def ridge_classifier(gram: Tensor, cross: Tensor, ridge: float) -> Tensor | None:
    """``(G + λI)⁻¹Q`` transposed, ``[K, M]``; ``None`` where G + λI is singular in float64.

    gram: [M, M], cross: [M, K].
    """
    factor, info = torch.linalg.cholesky_ex(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return None if int(info) else torch.cholesky_solve(cross, factor).T


def squared_error(weight: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """``|HWᵀ - Y|²`` up to the constant ``|Y|²``, from ``gram = HᵀH: [M, M]`` and ``cross = HᵀY: [M, K]``."""
    return ((weight @ gram) * weight).sum() - 2 * (weight.T * cross).sum()
