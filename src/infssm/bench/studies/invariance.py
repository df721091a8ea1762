"""What each distance says of a system and of the same system in other coordinates: it should say 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.bench.studies.study import Study, axes, register_study
from infssm.ssm import StateSpace, distance, list_distances


@register_study("invariance")
def invariance(*, n: int = 8, systems: int = 64, seed: int = 0) -> Study:
    """Largest distance between a random system and itself after a change of coordinates, for every kind.

    Changes: none, a permutation of the states, a diagonal rescaling, a general invertible P (through
    ``StateSpace.from_dense``), and, as a yardstick, a real change of the poles by 0.01.
    """
    generator = torch.Generator().manual_seed(seed)
    system = _random_systems(systems, n, generator)
    a, c, b = system.a, system.c, system.b
    assert b is not None
    order = torch.rand(a.shape, generator=generator).argsort(dim=-1)
    scale = torch.rand(a.shape, generator=generator, dtype=torch.float64) + 0.5
    noise = torch.randn(*a.shape, n, generator=generator, dtype=torch.float64)
    P = torch.eye(n, dtype=torch.float64) + 0.3 * noise / n**0.5
    inverse = torch.linalg.inv(P)
    A, C, B = torch.diag_embed(a), c.unsqueeze(-2), b.unsqueeze(-1)
    changes = {
        "none": (system, system),
        "permutation": (system, system.map(lambda x: x.gather(-1, order))),
        "rescaling": (system, StateSpace(a, c / scale, b * scale)),
        "general P": (StateSpace.from_dense(A, C, B), StateSpace.from_dense(P @ A @ inverse, C @ inverse, P @ B)),
        "poles + 0.01": (system, StateSpace(a + 0.01, c, b)),
    }
    table: dict[str, dict[str, float]] = {kind: {} for kind in list_distances()}
    for change, (old, new) in changes.items():
        for kind in table:
            options: dict[str, Any] = {"equality": "off"} if kind == "simplified" else {}
            table[kind][change] = float(distance(old, new, kind=kind, **options).abs().max())
    largest = {kind: max(row[c] for c in [*changes][:-1]) for kind, row in table.items()}
    exact = [kind for kind, value in largest.items() if value < 1e-6]
    others = [f"{kind} (up to {value:.2g})" for kind, value in largest.items() if kind not in exact]
    text = (
        f"Unchanged by any change of coordinates (below 1e-6): {', '.join(exact) or 'none'}. "
        f"Not: {', '.join(others) or 'none'}."
    )
    data = {"n": n, "systems": systems, "seed": seed, "largest_distance": table}
    return Study("invariance", data, _figure(table), text)


def _random_systems(count: int, n: int, generator: torch.Generator) -> StateSpace:
    """Systems with well separated poles in (-0.9, 0.9), in float64."""
    grid = torch.linspace(-0.85, 0.85, n, dtype=torch.float64)
    a = grid + (torch.rand(count, n, generator=generator, dtype=torch.float64) - 0.5) * (0.8 / n)
    c, b = torch.randn(2, count, n, generator=generator, dtype=torch.float64)
    return StateSpace(a, c + c.sign() * 0.2, b)


def _figure(table: dict[str, dict[str, float]]) -> Any:
    figure, (panel,) = axes(1, width=7.5)
    kinds, changes = list(table), list(next(iter(table.values())))
    values = Tensor([[max(table[k][c], 1e-18) for c in changes] for k in kinds]).log10().numpy()
    image = panel.imshow(values, cmap="viridis", aspect="auto")
    panel.set_xticks(range(len(changes)), changes)
    panel.set_yticks(range(len(kinds)), kinds)
    panel.grid(visible=False)
    for i, kind in enumerate(kinds):
        for j, change in enumerate(changes):
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": "k" if values[i, j] > -4 else "w"}
            panel.text(j, i, f"{table[kind][change]:.0e}", fontsize=7, **style)
    figure.colorbar(image, ax=panel, label="log10 of the largest distance")
    return figure
