"""Does the simplified cosine fall as a system is perturbed? The paper's Monte Carlo, in both readings of its noise."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from infssm.bench.studies.study import Study, axes, register_study
from infssm.ssm import StateSpace, distance

_LEVELS = 100
_CHUNK = 250
"""Draws per chunk: 25,000 pairs of systems, a few MiB."""


@register_study("monte-carlo")
def monte_carlo(
    *,
    iterations: int = 10_000,
    n: int = 16,
    noise: Literal["std", "variance"] = "std",
    squared: bool = False,
    equality: bool = True,
    seed: int = 0,
) -> Study:
    """Correlate cos θ of (A, C) and its perturbation with the size of the perturbation.

    A and C are drawn from N(0, I), noise level i = 0…99 has standard deviation i/25 (``noise="std"``, which reproduces
    the paper's number) or variance i/25 (``"variance"``, which is what its text says); all is soft-normalised.
    ``squared`` takes cos² instead of cos; ``equality`` applies the rule that equal systems have cos θ = 1.
    """
    generator = torch.Generator().manual_seed(seed)
    # float64: at the largest noise, soft-normalised poles round to 1 in float32 and their Gram is infinite.
    levels = torch.arange(_LEVELS, dtype=torch.float64) / 25
    scale = levels if noise == "std" else levels.sqrt()
    counts = [min(_CHUNK, iterations - start) for start in range(0, iterations, _CHUNK)]
    cosines = torch.cat([_cosines(count, n, scale, equality, generator) for count in counts])
    if squared:
        cosines = cosines.square()
    r = pearson(levels, cosines)
    data: dict[str, Any] = {
        "iterations": iterations,
        "n": n,
        "noise": noise,
        "squared": squared,
        "equality": equality,
        "seed": seed,
        "r_mean": float(r.mean()),
        "r_std": float(r.std()),
        "cos_mean": cosines.mean(dim=0).tolist(),
        "paper": {"r_mean": -0.8962, "r_std": 0.01515},
    }
    text = (
        f"Pearson's r between noise level and cos θ over {iterations:,} draws (n = {n}): "
        f"{data['r_mean']:.4f} ± {data['r_std']:.4f}; the paper reports -0.8962 ± 0.0152. "
        f"The noise level is read as the {'standard deviation' if noise == 'std' else 'variance'}."
    )
    return Study("monte-carlo", data, _figure(levels, cosines, r), text)


def _cosines(count: int, n: int, scale: Tensor, equality: bool, generator: torch.Generator) -> Tensor:
    """Cosines of ``count`` systems against their perturbations: [count, levels]."""
    a, c = torch.randn(2, count, 1, n, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, count, _LEVELS, n, generator=generator, dtype=torch.float64) * scale[:, None]
    old = StateSpace(a.expand(-1, _LEVELS, -1), c.expand(-1, _LEVELS, -1))
    new = StateSpace(a + noise[0], c + noise[1])
    rule = "token" if equality else "off"
    return (1 - distance(old, new, kind="simplified", soft_normalize=True, validate=False, equality=rule)).sqrt()


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's r of ``x: [m]`` with each row of ``y: [k, m]``: [k]."""
    x, y = x - x.mean(), y - y.mean(dim=-1, keepdim=True)
    r: Tensor = (y @ x) / (y.norm(dim=-1) * x.norm())
    return r


def _figure(levels: Tensor, cosines: Tensor, r: Tensor) -> Any:
    figure, (left, right) = axes(2)
    quantiles = cosines.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), dim=0)
    left.fill_between(levels, quantiles[0], quantiles[2], alpha=0.2, label="10-90 %")
    left.plot(levels, quantiles[1], label="median")
    left.set(xlabel="noise level i/25", ylabel="cos θ (simplified)")
    left.legend(frameon=False)
    right.hist(r.numpy(), bins=60)
    right.axvline(-0.8962, color="k", linestyle="--", label="paper's mean")
    right.set(xlabel="Pearson's r per draw", ylabel="draws")
    right.legend(frameon=False)
    return figure
