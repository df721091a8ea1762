"""docs/results/digits.md: every method and every distance on the main job's stream."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import SEEDS, Bench, Outcome, best_weight
from infssm.geometry import list_distances
from infssm.runs import environment
from infssm.train.main_job import MAIN_JOB

FACTORS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
"""Grid of the exact distances, as multiples of the weight that ``auto`` chose."""

SLOW = {"chordal": 4, "geodesic": 4}
"""Kinds that cost O(n^3) and how many weights of the grid they get."""

GRIDS: dict[str, tuple[str, dict[str, Any], Sequence[float]]] = {
    "ewc": ("weight", {}, (1e1, 1e3, 1e5, 1e7)),
    "si": ("weight", {}, (1e0, 1e2, 1e4, 1e6)),
    "mas": ("weight", {}, (1e-1, 1e1, 1e3, 1e5)),
    "lwf-ac": ("weight", {}, (1e2, 1e3, 1e4, 1e5, 1e6)),
    "lwf-abc": ("weight", {"b_weight": 1e4}, (1e3, 1e4, 1e5)),
    "inf-ssm": ("weight", {}, (1e0, 1e1, 1e2, 1e3, 1e4, 1e5)),
    "inf-ssm+": ("weight", {"gamma": 10.0}, (1e1, 1e3, 1e5)),
}

REGIMES = {
    "lr 1e-3": {},
    "lr 1e-4": {"lr": 1e-4, "min_lr": 1e-6, "warmup_lr": 1e-6},
    "lr 1e-3, no weight decay": {"weight_decay": 0.0},
}


def base(_: str | None) -> Mapping[str, Any]:
    return MAIN_JOB


def write(bench: Bench, folder: Path) -> None:
    bench.go([("seq", {}, seed) for seed in SEEDS])
    chosen: dict[str, tuple[str, dict[str, Any]]] = {"seq": ("seq", {}), "joint": ("joint", {}), "ucl": ("ucl", {})}
    grids: dict[str, Any] = {}
    for name, (key, options, weights) in GRIDS.items():
        grid = best_weight(bench, name, options, weights, key)
        weight = max(grid, key=lambda row: row[1].val)[0]
        chosen[name], grids[name] = (name, {**options, key: weight}), _grid(grid)
    autos = {}
    kinds = [*list_distances(), "martin+0.1*c"]
    kinds.remove("simplified")
    for kind, auto in zip(kinds, bench.go([("inf-ssm-exact", {"distance": k}, 0) for k in kinds]), strict=True):
        weights = [float(f"{factor * auto.weight:.3g}") for factor in FACTORS[: SLOW.get(kind)]]
        grid = best_weight(bench, "inf-ssm-exact", {"distance": kind}, weights, "weight")
        weight = max(grid, key=lambda row: row[1].val)[0]
        chosen[f"inf-ssm-exact, {kind}"] = ("inf-ssm-exact", {"distance": kind, "weight": weight})
        grids[f"inf-ssm-exact, {kind}"] = _grid(grid)
        autos[kind] = {"auto": auto.weight, "best": weight, "auto_val": auto.val, "auto_aa": auto.aa}
    chosen["inf-ssm-exact, auto"] = ("inf-ssm-exact", {})
    runs = [(method, options, seed) for method, options in chosen.values() for seed in SEEDS]
    outcomes = bench.go(runs)
    rows = {label: outcomes[3 * i : 3 * i + 3] for i, label in enumerate(chosen)}
    regimes = _simplified_regimes(bench)
    page = _page(rows, chosen, autos, grids, regimes)
    (folder / "digits.md").write_text(page, encoding="utf-8")
    data = {
        "environment": machine(),
        "seeds": SEEDS,
        "rows": {k: {"options": chosen[k][1], "runs": [o._asdict() for o in v]} for k, v in rows.items()},
        "auto": autos,
        "grids": grids,
        "simplified": regimes,
    }
    (folder / "digits.json").write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")


def _simplified_regimes(bench: Bench) -> list[dict[str, Any]]:
    """Seq and the paper's distance in every regime tried, on seed 0."""
    rows = []
    for label, train in REGIMES.items():
        there = Bench(bench.name, {**MAIN_JOB, "train": {**MAIN_JOB["train"], **train}}, bench.out, bench.workers)
        weights = (1e0, 1e2, 1e4)
        seq = there.go([("seq", {}, 0)])[0]
        rows.append({"regime": label, "method": "seq", **seq._asdict()})
        for bias in (True, False):
            runs = [("inf-ssm", {"weight": w, "states": {"include_dt_bias": bias}}, 0) for w in weights]
            for weight, outcome in zip(weights, there.go(runs), strict=True):
                name = f"inf-ssm, weight {weight:g}{'' if bias else ', no dt bias'}"
                rows.append({"regime": label, "method": name, **outcome._asdict()})
    return rows


def _grid(grid: Sequence[tuple[float, Outcome]]) -> list[dict[str, float | None]]:
    return [{**outcome._asdict(), "weight": weight} for weight, outcome in grid]


def machine() -> dict[str, Any]:
    """Versions, commit and processor, without anything about where files lie."""
    found = environment()
    return {key: found[key] for key in ("python", "packages", "commit", "cpu", "cores", "threads")}


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def table(rows: Mapping[str, Sequence[Outcome]], weights: Mapping[str, str]) -> list[str]:
    lines = ["| method | weight | AA | AIA | FM | task-inc. AA | s per run |", "|---|---|---|---|---|---|---|"]
    for label, outcomes in rows.items():
        cells = [spread([getattr(o, k) for o in outcomes]) for k in ("aa", "aia", "fm", "ti")]
        seconds = statistics.mean(o.seconds for o in outcomes)
        lines.append(f"| {label} | {weights[label]} | {' | '.join(cells)} | {seconds:.0f} |")
    return lines


def _page(
    rows: Mapping[str, Sequence[Outcome]],
    chosen: Mapping[str, tuple[str, dict[str, Any]]],
    autos: Mapping[str, Any],
    grids: Mapping[str, Any],
    regimes: Sequence[Mapping[str, Any]],
) -> str:
    weights = {
        label: f"{options['weight']:g}" if "weight" in options else "-" for label, (_, options) in chosen.items()
    }
    weights["inf-ssm-exact, auto"] = ", ".join(f"{o.weight:.3g}" for o in rows["inf-ssm-exact, auto"])
    lines = [
        "# Digits",
        "",
        "scikit-learn's digits in five tasks of two classes, Vim-nano (8 x 8 pixels, patch 2, depth 4, width 64), from",
        "the task-0 model that seq trained with the same seed (si, ucl and joint train task 0 themselves). Seeds",
        "0, 10, 100; mean ± sample deviation, percent. Weights chosen on the validation images of seed 0. Made by",
        "`python -m benchmarks.results digits --out RUNS` on two cores; numbers in `digits.json` beside this page.",
        "",
        *table(rows, weights),
        "",
        "FM alone misleads: a low learning rate or a huge weight lowers it too. Task-incremental AA, accuracy inside a",
        "task's own classes, shows what the features still know.",
        "",
        "## What `auto` chose, beside the best of a grid",
        "",
        "Grid: 0.01 to 1000 times the automatic weight by decades (chordal and geodesic: to 10 times), seed 0.",
        "",
        "| distance | auto | best of grid | validation AA with auto | with best |",
        "|---|---|---|---|---|",
    ]
    for kind, row in autos.items():
        best = max(r["val"] for r in grids[f"inf-ssm-exact, {kind}"])
        lines.append(f"| {kind} | {row['auto']:.3g} | {row['best']:.3g} | {row['auto_val']:.1f} | {best:.1f} |")
    lines += ["", "## The paper's simplified distance, in every regime tried", "", "Seed 0.", ""]
    lines += ["| regime | method | validation AA | AA | FM | task-inc. AA |", "|---|---|---|---|---|---|"]
    for row in regimes:
        numbers = " | ".join(f"{row[k]:.1f}" for k in ("val", "aa", "fm", "ti"))
        lines.append(f"| {row['regime']} | {row['method']} | {numbers} |")
    lines += ["", "## All grids", "", "Validation AA on seed 0.", "", "| method | weight: validation AA |", "|---|---|"]
    for label, grid in grids.items():
        cells = ", ".join("{weight:.3g}: {val:.1f}".format(**row) for row in grid)
        lines.append(f"| {label} | {cells} |")
    return "\n".join(lines) + "\n"
