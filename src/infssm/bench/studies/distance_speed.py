"""Time of every distance against the textbook formulas with inverses and determinants, and how often those fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infssm._timing import measure, num_threads
from infssm.bench.studies.study import Study, axes, register_study
from infssm.ops import backend_report
from infssm.ssm import StateSpace, distance, gram, list_distances

Formula = Callable[[StateSpace, StateSpace], Tensor]
_LIMITS: dict[str, Any] = {"at_least": 0.02, "at_most": 0.3}
"""Seconds for which a fast formula is repeated at least, and after which a slow one is not repeated again."""
_ROUNDS = 3
"""Times all formulas are gone through, so that a passing load does not fall on one of them alone."""
_BOUND = 3.0
"""Times the simplified distance above which a kind is named in the text."""
_REASONS = {"geodesic": "systems with angles near 90 degrees or widely spread poles need every angle by itself, O(n^3)"}


@register_study("distance-speed")
def distance_speed(
    *, sizes: Sequence[int] = (16, 32, 64, 100, 128), systems: int = 16, repeats: int = 5, seed: int = 0
) -> Study:
    """Fastest seconds per call on ``systems`` pairs of size n, forward and forward + backward, in float32.

    One thread: what a formula takes, not what starting a second one takes or a busy machine withholds. Ours are timed
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
    return Study("distance-speed", data, _figure(rows), _text(rows, backend))


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


def _text(rows: list[dict[str, Any]], backend: str) -> str:
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


def _figure(rows: list[dict[str, Any]]) -> Any:
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
