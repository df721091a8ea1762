"""Studies of the distances between systems: the paper's Monte Carlo, invariance to coordinates, and speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from infssm._machine import measure, num_threads
from infssm.bench.studies.study import Study, axes, register_study
from infssm.ops import backend_report
from infssm.ssm import StateSpace, distance, gram, list_distances

_LEVELS = 100
_CHUNK = 250
"""Draws per chunk: 25,000 pairs of systems, a few MiB."""
Formula = Callable[[StateSpace, StateSpace], Tensor]
_LIMITS: dict[str, Any] = {"at_least": 0.02, "at_most": 0.3}
"""Seconds for which a fast formula is repeated at least, and after which a slow one is not repeated again."""
_ROUNDS = 3
"""Rounds over all formulas, so that a short load on the machine does not slow one of them only."""
_BOUND = 3.0
"""Kinds that take more than this many times as long as the simplified distance are named in the text."""
_REASONS = {"geodesic": "systems with angles near 90 degrees or widely spread poles need every angle by itself, O(n^3)"}


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
    return Study("monte-carlo", data, _monte_carlo_figure(levels, cosines, r), text)


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


def _monte_carlo_figure(levels: Tensor, cosines: Tensor, r: Tensor) -> Any:
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


@register_study("invariance")
def invariance(*, n: int = 8, systems: int = 64, seed: int = 0) -> Study:
    """Largest distance between a random system and itself after a change of coordinates, for every kind.

    Changes: none, a permutation of the states, a diagonal rescaling, a general invertible P (through
    ``StateSpace.from_dense``), and, as a yardstick, a real change of the poles by 0.01.
    """
    generator = torch.Generator().manual_seed(seed)
    # Systems with well separated poles in (-0.9, 0.9).
    grid = torch.linspace(-0.85, 0.85, n, dtype=torch.float64)
    a = grid + (torch.rand(systems, n, generator=generator, dtype=torch.float64) - 0.5) * (0.8 / n)
    c, b = torch.randn(2, systems, n, generator=generator, dtype=torch.float64)
    c = c + c.sign() * 0.2
    system = StateSpace(a, c, b)
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
    return Study("invariance", data, _invariance_figure(table), text)


def _invariance_figure(table: dict[str, dict[str, float]]) -> Any:
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


@register_study("distance-speed")
def distance_speed(
    *, sizes: Sequence[int] = (16, 32, 64, 100, 128), systems: int = 16, repeats: int = 5, seed: int = 0
) -> Study:
    """Fastest seconds per call on ``systems`` pairs of size n, forward and forward + backward, in float32.

    On one thread, so that neither starting threads nor other processes on the machine are timed. Ours are timed
    as training calls them: raw states, soft-normalised inside. The textbook rows build the Gram matrices and take
    inverse and determinant, as the paper times them (Table 8). A value counts as failed where it is not finite,
    negative, or off by more than 10 % from the float64 closed form.
    """
    formulas: dict[str, Formula] = {kind: _ours(kind) for kind in list_distances()} | _TEXTBOOK
    rows: list[dict[str, Any]] = []
    for n in sizes:
        # Raw Gaussian systems and a perturbation of them by 0.1.
        a, c, b, da, dc, db = torch.randn(6, systems, n, generator=torch.Generator().manual_seed(seed))
        pair = StateSpace(a, c, b), StateSpace(a + 0.1 * da, c + 0.1 * dc, b + 0.1 * db)
        normalized = pair[0].soft_normalized(), pair[1].soft_normalized()  # which the textbook formulas do not do
        spaces = {name: normalized if name in _TEXTBOOK else pair for name in formulas}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in formulas}
        with num_threads(1):
            for name in [*formulas] * _ROUNDS:
                times[name].append(_time(formulas[name], *spaces[name], repeats))
        for name, rounds in times.items():
            forward, both = (min(seconds) for seconds in zip(*rounds, strict=True))
            rows.append({"n": n, "formula": name, "forward_s": forward, "forward_backward_s": both})
            kind = name.partition(",")[0]
            if f"{kind}, determinant" in _TEXTBOOK:
                value = formulas[name](*spaces[name])
                truth = _ours(kind)(pair[0].map(Tensor.double), pair[1].map(Tensor.double))
                wrong = ~value.isfinite() | (value < 0) | ((value.double() - truth).abs() > 0.1 * truth)
                rows[-1]["failed"] = float(wrong.double().mean())
    backend = backend_report()["default"]
    data = {"systems": systems, "repeats": repeats, "threads": 1, "backend": backend, "rows": rows}
    return Study("distance-speed", data, _speed_figure(rows), _speed_text(rows, backend))


def _ours(kind: str) -> Formula:
    return lambda old, new: distance(old, new, kind=kind, soft_normalize=True, validate=False)


def _determinant(old: StateSpace, new: StateSpace) -> Tensor:
    """Π cos²θ = det(G1⁻¹ G3 G2⁻¹ G3ᵀ): [...]."""
    g1, g2, g3 = gram(old.a, old.c, old.a, old.c), gram(new.a, new.c, new.a, new.c), gram(old.a, old.c, new.a, new.c)
    product: Tensor = torch.linalg.det(torch.linalg.inv_ex(g1).inverse @ g3 @ torch.linalg.inv_ex(g2).inverse @ g3.mT)
    return product


_TEXTBOOK: dict[str, Formula] = {
    "martin, determinant": lambda old, new: -_determinant(old, new).log(),
    "fubini-study, determinant": lambda old, new: _determinant(old, new).sqrt().acos().square(),
    "binet-cauchy, determinant": lambda old, new: 1 - _determinant(old, new),
}


def _time(formula: Formula, old: StateSpace, new: StateSpace, repeats: int) -> tuple[float, float]:
    """Fastest seconds forward, and forward and backward: what else runs on the machine only ever adds."""
    leaf = new.map(lambda x: x.clone().requires_grad_())
    with torch.no_grad():
        forward = measure(lambda: formula(old, new), repeats, **_LIMITS)
    both = measure(lambda: formula(old, leaf).sum().backward(), repeats, **_LIMITS)  # type: ignore[no-untyped-call]
    return min(forward), min(both)


def _speed_text(rows: list[dict[str, Any]], backend: str) -> str:
    n = max((row["n"] for row in rows if row["n"] <= 100), default=rows[-1]["n"])
    here = {row["formula"]: row for row in rows if row["n"] == n}
    base = here["simplified"]
    times = {name: row["forward_s"] / base["forward_s"] for name, row in here.items()}
    both = {name: row["forward_backward_s"] / base["forward_backward_s"] for name, row in here.items()}
    ours = [name for name in here if name not in _TEXTBOOK and name != "simplified"]
    book = [f"{name} {times[name]:.0f} times ({100 * here[name]['failed']:.0f} % failed)" for name in _TEXTBOOK]
    compiled = "a busy machine, or many systems at once"
    other = "no compiled kernel served it" if backend == "reference" else compiled
    above = [f"{name} ({_REASONS.get(name, other)})" for name in ours if times[name] > _BOUND]
    verdict = f"Above {_BOUND:.0f} times: {', '.join(above)}." if above else f"All are within {_BOUND:.0f} times."
    return (
        f"At n = {n} in float32 on one thread the simplified distance takes {1e3 * base['forward_s']:.3f} ms forward "
        f"and {1e3 * base['forward_backward_s']:.3f} ms with the gradient. Time over that, forward (with gradient): "
        f"{', '.join(f'{name} {times[name]:.1f} ({both[name]:.1f})' for name in ours)}. {verdict} "
        f"The textbook formulas: {', '.join(book)}."
    )


def _speed_figure(rows: list[dict[str, Any]]) -> Any:
    figure, panels = axes(2, width=5.5, height=4.2)
    kinds = list_distances()
    for panel, key in zip(panels, ("forward_s", "forward_backward_s"), strict=True):
        for name in dict.fromkeys(row["formula"] for row in rows):
            mine = [row for row in rows if row["formula"] == name]
            colour, style = f"C{kinds.index(name.partition(',')[0])}", "--" if "," in name else "-"
            times = [1e3 * row[key] for row in mine]
            panel.plot([row["n"] for row in mine], times, linestyle=style, color=colour, marker=".", label=name)
        title = "forward" if key == "forward_s" else "forward + backward"
        panel.set(xlabel="n", ylabel="ms per call", yscale="log", title=title)
    panels[1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
