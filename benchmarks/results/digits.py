"""docs/results/digits.md: every exemplar-free method and every distance on the main job's stream."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import machine, markdown_table, spread, write_json
from benchmarks.results.common import (
    SEEDS,
    Bench,
    Candidate,
    Outcome,
    gain,
    outcomes,
    search,
    short_table,
    spreads,
    table,
)
from infssm.bench.presets import main_job
from infssm.ssm import list_distances

BASE, _ = main_job({"model": {}})  # from scratch

METHODS: dict[str, Candidate] = {
    **{name: (name, {}, "weight", 1.0) for name in ("ewc", "si", "mas", "lwf-ac", "lwf-abc", "inf-ssm", "inf-ssm+")},
    "ucl": ("ucl", {}, "beta", 1e-6),
}
KINDS = [*(kind for kind in list_distances() if kind != "simplified"), "martin+0.1*c"]
EXACT: dict[str, Candidate] = {kind: ("inf-ssm-exact", {"distance": kind}, "weight", 1.0) for kind in KINDS}

REGIMES = {
    "lr 1e-3": {},
    "lr 1e-4": {"lr": 1e-4, "min_lr": 1e-6, "warmup_lr": 1e-6},
    "lr 1e-3, no weight decay": {"weight_decay": 0.0},
    "lr 1e-3, best epoch": {"select_best": True},
}

ANSWER = """\
Without stored images, penalties on states keep more accuracy than penalties on weights: `inf-ssm-exact` at its best
weight ends with an AA of {exact} %, `lwf-ac` with {lwf} %, `ewc` with {ewc} % and plain sequential training with
{seq} %. Three seeds do not establish the lead over `lwf-ac` ({gain} points, paired), and joint training on all
data, the upper bound, is far above ({joint} %). The paper's simplified distance (`inf-ssm`) shows no clear gain at
any weight or learning rate tried."""

SHOWN = {
    "seq": "plain sequential training",
    "ewc": "`ewc`",
    "lwf-ac": "`lwf-ac`",
    "inf-ssm": "`inf-ssm` (the paper's simplified distance)",
    "inf-ssm-exact, auto": "`inf-ssm-exact`, automatic weight",
    "inf-ssm-exact, output": "`inf-ssm-exact`, best weight of the search",
    "joint": "joint training on all data",
}


def write(bench: Bench, folder: Path) -> None:
    data = {"environment": machine(), "seeds": SEEDS, **_measure(bench)}
    write_json(folder / "digits.json", data)


def _measure(bench: Bench) -> dict[str, Any]:
    plain = bench.every_seed({name: (name, {}) for name in ("seq", "joint")})
    found = search(bench, METHODS)
    autos = bench.every_seed({kind: (method, options) for kind, (method, options, *_) in EXACT.items()})
    regimes = [row for label, train in REGIMES.items() for row in _simplified(bench.trained(train), label)]
    exact = search(bench, EXACT)
    rows = plain | {label: f.grid[f.weight] for label, f in found.items()}
    rows |= {f"inf-ssm-exact, {kind}": f.grid[f.weight] for kind, f in exact.items()}
    rows["inf-ssm-exact, auto"] = autos["output"]
    weights = {label: f"{f.weight:g}" for label, f in found.items()}
    weights |= {f"inf-ssm-exact, {kind}": f"{f.weight:g}" for kind, f in exact.items()}
    weights["ucl"] = f"β {weights['ucl']}"
    weights["inf-ssm-exact, auto"] = ", ".join(f"{o.weight:.2g}" for o in autos["output"])
    compared = {
        "seq": ("seq", {}),
        **{name: (name, {"weight": found[name].weight}) for name in ("lwf-ac", "inf-ssm")},
        "inf-ssm-exact, output": ("inf-ssm-exact", {"weight": exact["output"].weight}),
        "inf-ssm-exact, auto": ("inf-ssm-exact", {}),
    }
    epochs = bench.trained({"select_best": True}).every_seed(compared)
    return {
        "rows": _plain(rows),
        "weights": weights,
        "auto": _plain(autos),
        "grids": {k: _plain({f"{w:g}": v for w, v in f.grid.items()}) for k, f in (found | exact).items()},
        "simplified": regimes,
        "epochs": _plain(epochs),
    }


def _plain(rows: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    return {label: [outcome._asdict() for outcome in runs] for label, runs in rows.items()}


def _simplified(bench: Bench, regime: str) -> list[dict[str, Any]]:
    """Seq, the paper's distance and ours in one regime."""
    methods: dict[str, tuple[str, dict[str, Any]]] = {"seq": ("seq", {})}
    for bias in (True, False) if regime in ("lr 1e-3", "lr 1e-4") else (True,):
        for weight in (1e0, 1e2, 1e4):
            label = f"inf-ssm, weight {weight:g}{'' if bias else ', no dt bias'}"
            methods[label] = ("inf-ssm", {"weight": weight, "states": {"include_dt_bias": bias}})
    methods["inf-ssm-exact, auto"] = ("inf-ssm-exact", {})
    return [{"regime": regime, "method": k, "runs": v} for k, v in _plain(bench.every_seed(methods)).items()]


def page(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """What of the page is computed, from what the JSON file holds."""
    rows = outcomes(data["rows"])
    exact = rows["inf-ssm-exact, output"]
    answered = {"exact": exact, "lwf": rows["lwf-ac"], **{name: rows[name] for name in ("ewc", "seq", "joint")}}
    numbers = {name: spread([o.aa for o in runs]) for name, runs in answered.items()}
    gains = [
        [label, *(gain(row, rows[other], key) for other in ("seq", "lwf-ac") for key in ("aa", "ti"))]
        for label, row in rows.items()
        if label not in ("seq", "joint")
    ]
    weights = []
    for kind, auto in outcomes(data["auto"]).items():
        weight, best = max(
            outcomes(data["grids"][kind]).items(), key=lambda item: statistics.mean(o.val for o in item[1])
        )
        by_seed = ", ".join(f"{o.weight:.2g}" for o in auto)
        weights.append([kind, by_seed, weight, *spreads(("aa", "ti"), auto, best)])
    epochs = [
        [label, *spreads(("aa", "ti", "fm"), rows[label], best)] for label, best in outcomes(data["epochs"]).items()
    ]
    regimes = [
        [row["regime"], row["method"], *(spread([run[k] for run in row["runs"]]) for k in ("aa", "fm", "ti"))]
        for row in data["simplified"]
    ]
    ends = [f"{name}, {end}" for name in ("AA", "task-inc. AA", "FM") for end in ("last", "best")]
    of_weights = ["distance", "auto, by seed", "best of search", "AA with auto", "with best", "task-inc. AA with auto"]
    paired = ["AA - seq", "task-inc. AA - seq", "AA - lwf-ac", "task-inc. AA - lwf-ac"]
    return {
        "answer": [ANSWER.format(gain=gain(exact, rows["lwf-ac"], "aa"), **numbers)],
        "short": short_table(rows, SHOWN),
        "table": table(rows, data["weights"]),
        "paired": markdown_table(["method", *paired], gains),
        "auto": markdown_table([*of_weights, "with best"], weights),
        "epochs": markdown_table(["method", *ends], epochs),
        "simplified": markdown_table(["regime", "method", "AA", "FM", "task-inc. AA"], regimes),
    }
