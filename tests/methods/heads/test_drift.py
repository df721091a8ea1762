"""Drift compensation against motions that were planted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infssm.methods.heads.statistical import MapDrift, MeanDrift
from tests.methods.heads.test_statistics import gathered, some


def planted(width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    matrix = torch.eye(width).double() + 0.3 * torch.randn(width, width, generator=rng).double()
    return matrix, torch.randn(width, generator=rng).double()


def test_a_planted_linear_drift_is_recovered():
    x, _ = some(rows=500)
    matrix, shift = planted()
    drift = MapDrift(7, ridge=1e-8)
    for part in x.double().split(64):
        drift.add(part, part @ matrix + shift)
    found, offset = drift.solve()
    torch.testing.assert_close(found, matrix, rtol=0, atol=1e-4)
    torch.testing.assert_close(offset, shift, rtol=0, atol=1e-4)


def test_statistics_of_old_classes_follow_a_planted_drift():
    """The map is fitted on two classes and moves the two others to where they would be measured."""
    x, y = some(rows=800)
    x = x.double()
    matrix, shift = planted()
    old, current = y < 2, y >= 2
    drift = MapDrift(7, ridge=1e-8)
    drift.add(x[current], x[current] @ matrix + shift)
    moved = gathered(x[old], y[old], per_class=True, size=64).transformed_by(*drift.solve())
    truth = gathered(x[old] @ matrix + shift, y[old], per_class=True, size=64)
    torch.testing.assert_close(moved.mean, truth.mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(moved.pooled, truth.pooled, rtol=1e-4, atol=1e-4)
    for label in range(2):
        torch.testing.assert_close(moved.covariance(label), truth.covariance(label), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("ridge", [0.01, 0.05, 1.0])
def test_the_map_is_the_ridge_solution(ridge):
    """Against an augmented least-squares problem: sqrt(nλs)·I below the centred rows."""
    x, _ = some(rows=60)
    rng = np.random.default_rng(0)
    old = x.double().numpy()
    new = old + rng.standard_normal(old.shape)
    drift = MapDrift(7, ridge=ridge)
    drift.add(torch.from_numpy(old), torch.from_numpy(new))
    found, offset = drift.solve()
    centred, motion = old - old.mean(0), new - old
    scale = np.mean(np.sum(centred**2, axis=0) / len(old))
    rows = np.vstack([centred, np.sqrt(len(old) * ridge * scale) * np.eye(7)])
    targets = np.vstack([motion - motion.mean(0), np.zeros((7, 7))])
    change = np.linalg.lstsq(rows, targets, rcond=None)[0]
    np.testing.assert_allclose(found, np.eye(7) + change, rtol=0, atol=1e-9)
    np.testing.assert_allclose(offset, motion.mean(0) - old.mean(0) @ change, rtol=0, atol=1e-9)


def test_without_motion_nothing_moves_at_all():
    x, y = some()
    statistics = gathered(x, y, per_class=True, size=64)
    for drift in (MapDrift(7, ridge=0.05), MeanDrift(statistics)):
        drift.add(x, x)
        moved = statistics.transformed_by(*drift.solve())
        torch.testing.assert_close(moved.mean, statistics.mean, rtol=1e-14, atol=0)
        torch.testing.assert_close(moved.triangles, statistics.triangles, rtol=0, atol=0)


def test_features_that_do_not_vary_only_shift():
    x = torch.ones(20, 7)
    drift = MapDrift(7, ridge=0.05)
    drift.add(x, x + 2)
    matrix, shift = drift.solve()
    torch.testing.assert_close(matrix, torch.eye(7).double())
    torch.testing.assert_close(shift, torch.full((7,), 2.0).double())


def test_mean_drift_is_the_weighted_mean_motion():
    x, y = some()
    statistics = gathered(x, y, per_class=False, size=64)
    rng = torch.Generator().manual_seed(5)
    motion = torch.randn(x.shape, generator=rng)
    drift = MeanDrift(statistics)
    for part, moved in zip(x.split(50), (x + motion).split(50), strict=True):
        drift.add(part, moved)
    found = statistics.transformed_by(*drift.solve())
    sigma2 = np.trace(statistics.pooled.numpy())
    rows, moves = x.double().numpy(), ((x + motion).double() - x.double()).numpy()
    for label in range(4):
        mean = statistics.mean[label].numpy()
        weight = np.exp(-np.sum((rows - mean) ** 2, axis=1) / (2 * sigma2))
        np.testing.assert_allclose(found.mean[label], mean + weight @ moves / weight.sum(), rtol=1e-9)
    assert not found.mean[4:].any()


def test_a_class_far_from_every_image_stays():
    x, y = some()
    statistics = gathered(x, y, per_class=False, size=64)
    drift = MeanDrift(statistics)
    drift.add(x + 1e6, x + 1e6 + 1)
    torch.testing.assert_close(statistics.transformed_by(*drift.solve()).mean, statistics.mean)
