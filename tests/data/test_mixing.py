"""Mixup, CutMix and label smoothing."""

import pytest
import torch

from infssm.data import Mixing, make_mixing
from infssm.errors import ConfigError
from tests.compare import identical


def batch(count=4, size=8):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, size, size, generator=generator), torch.arange(count)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def weights(soft, y, smoothing, num_classes):
    """The share of the own label, recovered from soft targets with distinct labels."""
    return (soft[torch.arange(len(y)), y] - smoothing / num_classes) / (1 - smoothing)


@pytest.mark.parametrize("seed", range(5))
def test_mixup_weighs_pictures_and_targets_alike(seed):
    mixing = Mixing(10, cutmix_alpha=0)
    x, y = batch()
    mixed, soft = mixing(x.clone(), y, rng(seed))
    lam = weights(soft, y, 0.1, 10)
    assert torch.allclose(lam, lam[0])
    torch.testing.assert_close(mixed, lam[0] * x + (1 - lam[0]) * x.flip(0))
    torch.testing.assert_close(soft.sum(1), torch.ones(4))


@pytest.mark.parametrize("seed", range(8))
def test_cutmix_weight_is_the_area_kept(seed):
    mixing = Mixing(10, mixup_alpha=0)
    x, y = batch()
    mixed, soft = mixing(x.clone(), y, rng(seed))
    own = (mixed == x).all(1)
    assert identical(torch.where(own[:, None], x, x.flip(0)), mixed)
    torch.testing.assert_close(weights(soft, y, 0.1, 10), own.float().mean((1, 2)), rtol=1e-5, atol=1e-6)
    assert len({tuple(mask.flatten().tolist()) for mask in own}) == 1


def test_switch_and_beta_statistics():
    """Half of the batches are cut; Mixup weights have the variance of Beta(0.8, 0.8), 1 / (4 (2 * 0.8 + 1))."""
    mixing, x, y = (
        Mixing(2, smoothing=0.0),
        torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4),
        torch.arange(2),
    )
    cut, lams = 0, []
    for seed in range(1500):
        mixed, soft = mixing(x, y, rng(seed))
        if ((mixed == 0) | (mixed == 1)).all():
            cut += 1
        else:
            lams.append(soft[0, 0].item())
    assert 0.45 < cut / 1500 < 0.55
    values = torch.tensor(lams)
    assert abs(values.mean() - 0.5) < 0.04
    assert abs(values.var() - 1 / 10.4) < 0.01


def test_smoothing_spreads_over_all_classes():
    mixing = make_mixing(20, "none", label_smoothing=0.1)
    x, y = batch(3)
    same, soft = mixing(x, y, rng())
    assert identical(same, x)
    expected = torch.full((3, 20), 0.1 / 20)
    expected[torch.arange(3), y] = 0.9 + 0.1 / 20
    torch.testing.assert_close(soft, expected)


def test_odd_batches_and_names():
    with pytest.raises(ConfigError, match="must be even, got 3"):
        Mixing(10)(*batch(3), rng())
    assert make_mixing(10, "none") is None
    assert make_mixing(10, "deit", label_smoothing=0.1) == Mixing(10, 0.8, 1.0, 0.5, 0.1)
    with pytest.raises(ConfigError, match="unknown mixing"):
        make_mixing(10, "cutout")
