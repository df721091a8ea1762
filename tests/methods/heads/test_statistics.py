"""Class statistics against NumPy in float64, in parts as in one pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infssm.methods.heads.class_statistics import ClassStatistics, StatisticsSums


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
        # Kept in float32: its rounding, not more.
        np.testing.assert_allclose(found.covariance[:4], covariances, rtol=1e-6, atol=1e-5)
        assert not found.covariance[4:].any()


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("size", [1, 17, 240])
def test_batches_of_any_size_give_the_same(per_class, size):
    x, y = some()
    whole, parts = gathered(x, y, per_class=per_class, size=64), gathered(x, y, per_class=per_class, size=size)
    for name, tensor in whole.state_dict().items():
        if tensor is not None:
            torch.testing.assert_close(parts.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("per_class", [False, True])
def test_classes_of_two_tasks_together_are_those_of_one_pass(per_class):
    x, y = some()
    first, second = y < 2, y >= 2
    both = gathered(x, y, per_class=per_class, size=64)
    one = gathered(x[first], y[first], per_class=per_class, size=64)
    joined = one.replaced(gathered(x[second], y[second], per_class=per_class, size=64))
    for name, tensor in both.state_dict().items():
        if tensor is not None:
            torch.testing.assert_close(joined.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("per_class", [False, True])
def test_moving_statistics_is_moving_the_features(per_class):
    x, y = some()
    x = x.double()
    rng = torch.Generator().manual_seed(1)
    matrix, shift = torch.randn(7, 7, generator=rng).double(), torch.randn(7, generator=rng).double()
    moved = gathered(x, y, per_class=per_class, size=64).moved(matrix, shift)
    fresh = gathered(x @ matrix + shift, y, per_class=per_class, size=64)
    for name, tensor in fresh.state_dict().items():
        if tensor is not None:
            scale = float(tensor.abs().max())
            torch.testing.assert_close(moved.state_dict()[name], tensor, rtol=0, atol=1e-6 * scale)


def test_a_class_seen_again_is_taken_afresh():
    x, y = some()
    kept, fresh = gathered(x, y, per_class=True, size=64), gathered(x[y == 1] + 1, y[y == 1], per_class=True, size=64)
    joined = kept.replaced(fresh)
    torch.testing.assert_close(joined.mean[1], kept.mean[1] + 1)
    torch.testing.assert_close(joined.mean[0], kept.mean[0])


def test_far_from_zero_the_covariance_keeps_its_digits():
    x, y = some()
    near, far = (gathered(x.double() + offset, y, per_class=True, size=64) for offset in (0, 1e3))
    torch.testing.assert_close(far.pooled, near.pooled, rtol=1e-6, atol=1e-6)
