"""Time of every distance against the textbook formulas with inverses and determinants, and how often those fail."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infssm.geometry import StateSpace, distance, gram, list_distances
from infssm.studies._study import Study, axes, register_study

Formula = Callable[[StateSpace, StateSpace], Tensor]
_PATIENCE = 1.0
"""Seconds after which a slow formula is not repeated again."""


@register_study("distance-speed")
def distance_speed(
    *, sizes: Sequence[int] = (16, 32, 64, 100, 128), systems: int = 16, repeats: int = 9, seed: int = 0
) -> Study:
    """Median seconds per call on ``systems`` pairs of size n, forward and forward + backward, in float32.

    The textbook rows build the Gram matrices and take inverse and determinant, as the paper times them (Table 8). A
    value counts as failed where it is not finite, negative, or off by more than 10 % from the float64 closed form.
    """
    formulas: dict[str, Formula] = {kind: _ours(kind) for kind in list_distances()} | _TEXTBOOK
    rows = []
    for n in sizes:
        old, new = _pair(n, systems, seed)
        for name in formulas:
            forward, both = _time(formulas[name], old, new, repeats)
            rows.append({"n": n, "formula": name, "forward_s": forward, "forward_backward_s": both})
            if (truth := _TRUTH.get(name)) is not None:
                rows[-1]["failed"] = _failed(formulas[name](old, new), _ours(truth)(_double(old), _double(new)))
    data: dict[str, Any] = {"systems": systems, "repeats": repeats, "threads": torch.get_num_threads(), "rows": rows}
    return Study("distance-speed", data, _figure(rows), _text(rows))


def _ours(kind: str) -> Formula:
    return lambda old, new: distance(old, new, kind=kind, validate=False)


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
_TRUTH = {name: name.split(",")[0] for name in [*_TEXTBOOK, "martin", "fubini-study", "binet-cauchy"]}


def _pair(n: int, systems: int, seed: int) -> tuple[StateSpace, StateSpace]:
    """Soft-normalised Gaussian systems and a perturbation of them by 0.1."""
    g = torch.Generator().manual_seed(seed)
    a, c, b, da, dc, db = torch.randn(6, systems, n, generator=g)
    old, new = StateSpace(a, c, b), StateSpace(a + 0.1 * da, c + 0.1 * dc, b + 0.1 * db)
    return old.soft_normalized(), new.soft_normalized()


def _double(space: StateSpace) -> StateSpace:
    return space.map(Tensor.double)


def _time(formula: Formula, old: StateSpace, new: StateSpace, repeats: int) -> tuple[float, float]:
    leaf = new.map(lambda x: x.clone().requires_grad_())

    def both() -> None:
        formula(old, leaf).sum().backward()  # type: ignore[no-untyped-call]

    def median(call: Callable[[], object]) -> float:
        call()
        seconds: list[float] = []
        while len(seconds) < repeats and sum(seconds) < _PATIENCE:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    with torch.no_grad():
        forward = median(lambda: formula(old, new))
    return forward, median(both)


def _failed(value: Tensor, truth: Tensor) -> float:
    """Share of values that are not finite, negative, or off by more than 10 %."""
    wrong = ~value.isfinite() | (value < 0) | ((value.double() - truth).abs() > 0.1 * truth)
    return float(wrong.double().mean())


def _text(rows: list[dict[str, Any]]) -> str:
    n = max((row["n"] for row in rows if row["n"] <= 100), default=rows[-1]["n"])
    here = {row["formula"]: row for row in rows if row["n"] == n}
    base = here["simplified"]["forward_s"]
    ours = [f"{k} {here[k]['forward_s'] / base:.1f}" for k in here if "," not in k and k != "simplified"]
    book = [
        f"{k} {here[k]['forward_s'] / base:.0f} times ({100 * here[k]['failed']:.0f} % failed)"
        for k in here
        if "," in k
    ]
    return (
        f"At n = {n} in float32, time over the simplified distance's: {', '.join(ours)}. "
        f"The textbook formulas: {', '.join(book)}."
    )


def _figure(rows: list[dict[str, Any]]) -> Any:
    figure, (left, right) = axes(2, width=5.5, height=4.2)
    kinds = list_distances()
    for name in dict.fromkeys(row["formula"] for row in rows):
        mine = [row for row in rows if row["formula"] == name]
        colour = f"C{kinds.index(name.partition(',')[0])}"
        style: dict[str, Any] = {"linestyle": "--" if "," in name else "-", "color": colour, "marker": "."}
        style["label"] = name
        left.plot([r["n"] for r in mine], [1e3 * r["forward_s"] for r in mine], **style)
        right.plot([r["n"] for r in mine], [1e3 * r["forward_backward_s"] for r in mine], **style)
    for panel, title in ((left, "forward"), (right, "forward + backward")):
        panel.set(xlabel="n", ylabel="ms per call", yscale="log", title=title)
    right.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
