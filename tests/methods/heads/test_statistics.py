"""Class statistics against NumPy in float64, in parts as in one pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infssm.errors import ConfigError
from infssm.methods.heads.class_statistics import ClassStatistics, StatisticsSums
from tests.compare import identical


def some(rows: int = 240, width: int = 7, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=rng)
    # Near the identity: what a singular covariance does to float32 is not the subject.
    mixing = torch.eye(width) + 0.15 * torch.randn(classes, width, width, generator=rng)
    features = torch.einsum("nd,nde->ne", torch.randn(rows, width, generator=rng), mixing[labels])
    return features + 5 * torch.randn(classes, width, generator=rng)[labels], labels


def gathered(x: torch.Tensor, y: torch.Tensor, *, per_class: bool, size: int, total: int = 6) -> ClassStatistics:
    sums = StatisticsSums(total, x.shape[1], per_class=per_class)
    for a, b in zip(x.split(size), y.split(size), strict=True):
        sums.add(a, b)
    return sums.statistics()


def close(found: ClassStatistics, expected: ClassStatistics, tolerance: float = 1e-9) -> None:
    """Counts, means and covariances, which differ by rounding relative to the largest entry."""
    pairs = [(found.count, expected.count), (found.mean, expected.mean), (found.pooled, expected.pooled)]
    if expected.triangles is not None:
        pairs += zip(found.triangles, expected.triangles, strict=True)
    for one, other in pairs:
        scale = float(other.abs().max()) if other.numel() else 0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("per_class", [False, True])
def test_counts_means_and_covariances_are_numpys(per_class):
    x, y = some()
    found = gathered(x, y, per_class=per_class, size=32)
    parts = [x[y == label].double().numpy() for label in range(4)]
    assert found.count.tolist() == [*(len(p) for p in parts), 0, 0]
    np.testing.assert_allclose(found.mean[:4], [p.mean(0) for p in parts], rtol=1e-12)
    covariances = [np.cov(p.T, bias=True) for p in parts]
    pooled = sum(len(p) * c for p, c in zip(parts, covariances, strict=True)) / len(x)
    np.testing.assert_allclose(found.pooled, pooled, rtol=1e-9, atol=1e-9)
    if per_class:
        np.testing.assert_allclose([found.covariance(k) for k in range(4)], covariances, rtol=1e-9, atol=1e-9)
        assert [len(triangle) for triangle in found.triangles[4:]] == [0, 0]


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("size", [1, 17, 240])
def test_batches_of_any_size_give_the_same(per_class, size):
    x, y = some()
    close(gathered(x, y, per_class=per_class, size=size), gathered(x, y, per_class=per_class, size=64))


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("overlap", [False, True], ids=["new classes", "more images"])
def test_merged_parts_are_the_statistics_of_one_pass_and_can_be_taken_apart(per_class, overlap):
    """Classes of two tasks, of which the second may have more images of the first's, in either order."""
    x, y = some()
    first = (y < 2) | (torch.arange(len(y)) % 3 == 0) if overlap else y < 2
    both = gathered(x, y, per_class=per_class, size=64)
    one, two = (gathered(x[part], y[part], per_class=per_class, size=64) for part in (first, ~first))
    close(one.merged(two), both)
    close(two.merged(one), both)
    close(both.removed(two), one)
    if not overlap and per_class:  # nothing is computed with a class that only one of them has
        joined = one.merged(two)
        assert torch.equal(joined.mean[:4], torch.cat([one.mean[:2], two.mean[2:4]]))
        assert all(map(torch.equal, joined.triangles[:4], [*one.triangles[:2], *two.triangles[2:4]]))


def test_beyond_the_limit_of_memory_merging_keeps_the_pooled_covariance():
    x, y = some()
    first = y < 2
    one, two = (gathered(x[p], y[p], per_class=c, size=64) for p, c in ((first, True), (~first, False)))
    close(one.merged(two), gathered(x, y, per_class=False, size=64))
    with pytest.raises(ConfigError, match="cannot be forgotten if only the shared covariance of all classes"):
        two.without(0)


def test_a_class_that_was_removed_was_never_there():
    """Bit for bit: nothing of what remains was computed from it."""
    x, y = some()
    stay = y != 1
    found = gathered(x, y, per_class=True, size=1).without(1)
    for total in (5, 9):  # also with classes that come later
        never = gathered(x[stay], y[stay] - (y[stay] > 1).long(), per_class=True, size=1, total=total)
        assert identical(found.resized(total).pooled, never.pooled)
        torch.testing.assert_close(found.resized(total).state_dict(), never.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("per_class", [False, True])
def test_moving_statistics_is_moving_the_features(per_class):
    x, y = some()
    x = x.double()
    rng = torch.Generator().manual_seed(1)
    matrix, shift = torch.randn(7, 7, generator=rng).double(), torch.randn(7, generator=rng).double()
    moved = gathered(x, y, per_class=per_class, size=64).transformed_by(matrix, shift)
    close(moved, gathered(x @ matrix + shift, y, per_class=per_class, size=64))


def test_far_from_zero_the_covariance_keeps_its_digits():
    x, y = some()
    near, far = (gathered(x.double() + offset, y, per_class=True, size=64) for offset in (0, 1e3))
    torch.testing.assert_close(far.pooled, near.pooled, rtol=1e-6, atol=1e-6)
