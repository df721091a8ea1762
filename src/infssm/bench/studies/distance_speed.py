"""Time of every distance against the textbook formulas with inverses and determinants, and how often those fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from infssm.bench.studies.study import Study, axes, register_study
from infssm.ops import backend_report
from infssm.ssm import StateSpace, distance, gram, list_distances

Formula = Callable[[StateSpace, StateSpace], Tensor]
_PATIENCE = 0.3
"""Seconds after which a slow formula is not repeated again."""
_ENOUGH = 0.02
"""Seconds for which a fast one is repeated at least."""
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
    rows = []
    for n in sizes:
        old, new = _pair(n, systems, seed)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in formulas}
        with _one_thread():
            for name in [*formulas] * _ROUNDS:
                times[name].append(_time(formulas[name], *_states(name, old, new), repeats))
        for name, found in times.items():
            forward, both = (min(seconds) for seconds in zip(*found, strict=True))
            rows.append({"n": n, "formula": name, "forward_s": forward, "forward_backward_s": both})
            if (truth := _TRUTH.get(name)) is not None:
                value = formulas[name](*_states(name, old, new))
                rows[-1]["failed"] = _failed(value, _ours(truth)(_double(old), _double(new)))
    backend = backend_report()["default"]
    data = {"systems": systems, "repeats": repeats, "threads": 1, "backend": backend, "rows": rows}
    return Study("distance-speed", data, _figure(rows), _text(rows))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
_TRUTH = {name: name.split(",")[0] for name in [*_TEXTBOOK, "martin", "fubini-study", "binet-cauchy"]}


def _pair(n: int, systems: int, seed: int) -> tuple[StateSpace, StateSpace]:
    """Raw Gaussian systems and a perturbation of them by 0.1."""
    g = torch.Generator().manual_seed(seed)
    a, c, b, da, dc, db = torch.randn(6, systems, n, generator=g)
    return StateSpace(a, c, b), StateSpace(a + 0.1 * da, c + 0.1 * dc, b + 0.1 * db)


def _states(name: str, old: StateSpace, new: StateSpace) -> tuple[StateSpace, StateSpace]:
    """What the formula takes: the textbook ones do not soft-normalise."""
    return (old.soft_normalized(), new.soft_normalized()) if name in _TEXTBOOK else (old, new)


def _double(space: StateSpace) -> StateSpace:
    return space.map(Tensor.double)


def _time(formula: Formula, old: StateSpace, new: StateSpace, repeats: int) -> tuple[float, float]:
    leaf = new.map(lambda x: x.clone().requires_grad_())

    def both() -> None:
        formula(old, leaf).sum().backward()  # type: ignore[no-untyped-call]

    def fastest(call: Callable[[], object]) -> float:  # what else runs on the machine only ever adds
        call()
        seconds: list[float] = []
        while (len(seconds) < repeats or sum(seconds) < _ENOUGH) and sum(seconds) < _PATIENCE:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    with torch.no_grad():
        forward = fastest(lambda: formula(old, new))
    return forward, fastest(both)


def _failed(value: Tensor, truth: Tensor) -> float:
    """Share of values that are not finite, negative, or off by more than 10 %."""
    wrong = ~value.isfinite() | (value < 0) | ((value.double() - truth).abs() > 0.1 * truth)
    return float(wrong.double().mean())


def _text(rows: list[dict[str, Any]]) -> str:
    n = max((row["n"] for row in rows if row["n"] <= 100), default=rows[-1]["n"])
    here = {row["formula"]: row for row in rows if row["n"] == n}
    base = here["simplified"]
    times = {name: row["forward_s"] / base["forward_s"] for name, row in here.items()}
    ours = [name for name in here if name not in _TEXTBOOK and name != "simplified"]
    both = {name: here[name]["forward_backward_s"] / base["forward_backward_s"] for name in ours}
    book = [f"{name} {times[name]:.0f} times ({100 * here[name]['failed']:.0f} % failed)" for name in _TEXTBOOK]
    return (
        f"At n = {n} in float32 on one thread the simplified distance takes {1e3 * base['forward_s']:.3f} ms forward "
        f"and {1e3 * base['forward_backward_s']:.3f} ms with the gradient. Time over that, forward (with gradient): "
        f"{', '.join(f'{name} {times[name]:.1f} ({both[name]:.1f})' for name in ours)}. "
        f"{_beyond({name: times[name] for name in ours})} "
        f"The textbook formulas: {', '.join(book)}."
    )


def _beyond(times: dict[str, float]) -> str:
    """Which kinds are above the bound, each with its reason."""
    above = [name for name, value in times.items() if value > _BOUND]
    if not above:
        return f"All are within {_BOUND:.0f} times."
    other = (
        "no compiled kernel served it"
        if backend_report()["default"] == "reference"
        else "a busy machine, or many systems at once"
    )
    named = (f"{name} ({_REASONS.get(name, other)})" for name in above)
    return f"Above {_BOUND:.0f} times: {', '.join(named)}."


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
