"""The paper's Monte Carlo: the simplified cosine falls as the systems move apart."""

import torch

from infssm.ssm import StateSpace, distance, soft_normalize


def mean_correlation(draws, spread, generator):
    """Mean Pearson r between the perturbation level i = 0..99 and cos theta; noise of standard deviation spread(i)."""
    levels = torch.arange(100, dtype=torch.float64)
    scale = spread(levels)[:, None]
    total = 0.0
    for _ in range(draws // 100):
        a, c = torch.randn(2, 100, 1, 16, generator=generator, dtype=torch.float64)
        noise_a, noise_c = torch.randn(2, 100, 100, 16, generator=generator, dtype=torch.float64)
        old = StateSpace(soft_normalize(a), soft_normalize(c))
        new = StateSpace(soft_normalize(a + scale * noise_a), soft_normalize(c + scale * noise_c))
        cosine = (1 - distance(old, new, validate=False)).sqrt()
        stacked = torch.cat([levels[None], cosine])
        total += torch.corrcoef(stacked)[0, 1:].sum().item()
    return total / draws


def test_simplified_falls_with_the_perturbation_as_in_the_paper():
    r = mean_correlation(1000, lambda i: i / 25, torch.Generator().manual_seed(0))
    assert abs(r + 0.897) < 0.01


def test_with_variance_in_place_of_deviation_the_correlation_is_weaker():
    r = mean_correlation(300, lambda i: (i / 25).sqrt(), torch.Generator().manual_seed(0))
    assert abs(r + 0.676) < 0.03
