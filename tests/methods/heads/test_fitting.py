"""Classifiers from statistics against scikit-learn, and ridge regression against NumPy's least squares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis

from infssm.errors import ConfigError
from infssm.methods.heads.class_statistics import shrunk
from infssm.methods.heads.gaussians import Gaussians, gaussian_classifier
from infssm.methods.heads.gda import lda_classifier
from infssm.methods.heads.ranpac import ridge_classifier, squared_error
from tests.methods.heads.test_statistics import gathered, some

PRIORS = [0.25] * 4


def balanced() -> tuple[torch.Tensor, torch.Tensor]:
    """As many rows of each class: then the pooled covariance is the mean of the class covariances, as theirs is."""
    x, y = some(rows=800)
    rows = torch.cat([(y == label).nonzero().flatten()[:100] for label in range(4)])
    return x[rows].double(), y[rows]


@pytest.mark.parametrize("alpha", [0.01, 0.3])
def test_lda_is_scikit_learns(alpha):
    x, y = balanced()
    weight, bias = lda_classifier([gathered(x, y, per_class=False, size=64, total=4)], alpha)
    other = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=alpha, priors=PRIORS).fit(x.numpy(), y.numpy())
    logits = (x @ weight.T + bias).numpy()
    np.testing.assert_allclose(logits, other.decision_function(x.numpy()) - np.log(0.25), rtol=0, atol=1e-8)


def test_gda_is_scikit_learns_quadratic_one():
    """Without blending and shrunk by next to nothing; its versions divide covariances by n or by n - 1."""
    x, y = balanced()
    other = QuadraticDiscriminantAnalysis(priors=PRIORS, store_covariance=True).fit(x.numpy(), y.numpy())
    statistics = gathered(x, y, per_class=True, size=64, total=4)
    ratio = np.trace(other.covariance_[0]) / float(statistics.covariance(0).trace())
    assert min(abs(ratio - 1), abs(ratio - 100 / 99)) < 1e-5
    statistics = replace(statistics, triangles=[ratio * triangle for triangle in statistics.triangles])
    head = Gaussians(*(tensor.double() for tensor in gaussian_classifier(statistics, 1e-12, 0.0)))
    theirs = other.decision_function(x.numpy()) - np.log(0.25)
    # Covariances and whitening are kept in float32: a few of its roundings of the largest distance.
    np.testing.assert_allclose(head(x), theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(("alpha", "beta"), [(0.01, 0.75), (0.1, 0.5), (0.5, 1.0)])
def test_gda_is_the_log_density_of_blended_gaussians(alpha, beta):
    x, y = balanced()
    statistics = gathered(x, y, per_class=True, size=64)
    head = Gaussians(*(tensor.double() for tensor in gaussian_classifier(statistics, alpha, beta)))
    scores = head(x)
    for label in range(4):
        own = (1 - beta) * np.cov(x[y == label].numpy().T, bias=True) + beta * statistics.pooled.numpy()
        own = (1 - alpha) * own + alpha * np.mean(np.diag(own)) * np.eye(7)
        away = x.numpy() - x[y == label].numpy().mean(0)
        distance = np.einsum("nd,nd->n", away, np.linalg.solve(own, away.T).T)
        expected = -0.5 * distance - 0.5 * np.linalg.slogdet(own)[1]
        np.testing.assert_allclose(scores[:, label], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert (scores[:, 4:] == -torch.inf).all()


def test_gda_of_the_pooled_covariance_alone_ranks_as_lda():
    x, y = balanced()
    statistics = gathered(x, y, per_class=False, size=64)
    scores = Gaussians(*gaussian_classifier(statistics, 0.02, 0.5))(x)
    weight, bias = lda_classifier([statistics], 0.02)
    logits = x @ weight.T + bias
    torch.testing.assert_close(scores[:, :4] - scores[:, :1], logits[:, :4] - logits[:, :1], rtol=1e-9, atol=1e-9)


def test_scores_do_not_depend_on_how_many_classes_are_taken_at_a_time(monkeypatch):
    x, y = balanced()
    head = Gaussians(*gaussian_classifier(gathered(x, y, per_class=True, size=64), 0.02, 0.5)).double()
    many = head(x.repeat(3000, 1))  # more than the classes' part of memory: one at a time
    torch.testing.assert_close(many[: len(x)], head(x), rtol=1e-9, atol=1e-9)
    assert head(x[:0]).shape == (0, 6)


def test_shrinkage_makes_a_covariance_of_few_images_regular():
    x = torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    covariance = torch.cov(x.T, correction=0)
    assert torch.linalg.eigvalsh(shrunk(covariance, 0.1)).min() >= 0.1 * covariance.diagonal().mean() * (1 - 1e-9)
    torch.testing.assert_close(shrunk(covariance, 0.1).trace(), covariance.trace())
    torch.testing.assert_close(shrunk(torch.zeros(2, 2), 0.1), torch.eye(2))


def test_one_image_of_each_class_gives_the_nearest_mean():
    x, y = torch.tensor([[0.0, 0.0], [4.0, 0.0]]).double(), torch.tensor([0, 1])
    weight, bias = lda_classifier([gathered(x, y, per_class=False, size=2, total=2)], 0.02)
    assert (torch.tensor([[1.0, 9.0], [3.0, -9.0]]).double() @ weight.T + bias).argmax(1).tolist() == [0, 1]


def test_features_that_are_not_finite_are_named():
    x, y = balanced()
    x[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"train\.lr"):
        lda_classifier([gathered(x, y, per_class=False, size=64)], 0.02)


@pytest.mark.parametrize("ridge", [1e-3, 1.0, 1e3])
def test_ridge_is_the_least_squares_solution(ridge):
    rng = np.random.default_rng(1)
    hidden, targets = rng.standard_normal((50, 12)), rng.standard_normal((50, 3))
    gram, cross = torch.from_numpy(hidden.T @ hidden), torch.from_numpy(hidden.T @ targets)
    found = ridge_classifier(gram, cross, ridge)
    rows = np.vstack([hidden, np.sqrt(ridge) * np.eye(12)])
    expected = np.linalg.lstsq(rows, np.vstack([targets, np.zeros((12, 3))]), rcond=None)[0]
    np.testing.assert_allclose(found.T, expected, rtol=1e-9, atol=1e-12)
    error = np.sum((hidden @ found.numpy().T - targets) ** 2)
    np.testing.assert_allclose(squared_error(found, gram, cross) + np.sum(targets**2), error, rtol=1e-9)
    assert ridge_classifier(torch.zeros(4, 4).double() - 1, torch.zeros(4, 2).double(), 1e-8) is None
