"""What is computed of the page docs/results/compress.md."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.compress.jobs import JOBS
from benchmarks.pages import markdown_table, spread, write_tables

ARMS = ("output", "LAST's score", "magnitude", "output, no training", "from scratch")
LIMITS = {"%": (0.5, "points"), "bits per byte": (1.0, "% of the bits")}
FULL, HALF, FEWEST = "16", "8", "2"

Seeds = list[dict[str, Any]]


def lost(seeds: Seeds, n: str, arm: str = "output") -> list[float]:
    """Points of accuracy lost, or per cent more bits per byte, against the full model of the same seed."""
    pairs = [(seed["scores"][FULL]["full"], seed["scores"][n][arm]) for seed in seeds]
    return [full - now if seeds[0]["measure"] == "%" else 100 * (now / full - 1) for full, now in pairs]


def within(seeds: Seeds, n: str, arm: str = "output") -> bool:
    return mean(lost(seeds, n, arm)) <= LIMITS[seeds[0]["measure"]][0]


def listed(items: list[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items) or "none"


def answer(tasks: dict[str, Seeds]) -> str:
    """The cost of halving the states, and the tasks that need few states anyway."""
    costs = [f"{spread(lost(of, HALF), 2)} {LIMITS[of[0]['measure']][1]} on {name}" for name, of in tasks.items()]
    held = [name for name, of in tasks.items() if within(of, HALF)]
    easy = [name for name, of in tasks.items() if within(of, FEWEST, "from scratch")]
    return (
        f"Removing half of the states costs {listed(costs)} (mean ± standard deviation over seeds; negative: the "
        "small model is better). The aim, a loss of at most 0.5 points or 1 % of the bits, holds on "
        f"{listed(held)}. However, on {listed(easy)} a model trained from scratch with {FEWEST} states is within the "
        f"same limits of the one with {FULL}: these tasks show that compression does little harm and what it saves, "
        "but not that it is needed."
    )


def misses(tasks: dict[str, Seeds]) -> str:
    """Every arm, task and number of states beyond the limits, with what it lost."""
    missed = []
    for arm in ARMS[:-1]:
        places = [
            f"{name} with {n} states ({mean(lost(of, n, arm)):.1f})"
            for name, of in tasks.items()
            for n in of[0]["scores"]
            if n != FULL and not within(of, n, arm)
        ]
        missed += [f"`{arm}` on {listed(places)}"] if places else []
    return f"These lose more than the limits: {'; '.join(missed) or 'no arm'}."


def write(found: dict[str, Any], path: Path) -> None:
    """Write into the page; keys of the figures are `task, seed`."""
    tasks = {name: [of for key, of in found.items() if key.rpartition(", ")[0] == name] for name in JOBS}
    tasks = {name: of for name, of in tasks.items() if of}
    rows = []
    for name, seeds in tasks.items():
        digits = 2 if seeds[0]["measure"] == "%" else 3
        for n in seeds[0]["scores"]:
            of_size = [seed["scores"][n] for seed in seeds]
            cells = [spread([scores[arm] for scores in of_size], digits) if n != FULL else "" for arm in ARMS]
            if n == FULL:
                cells[0] = spread([scores["full"] for scores in of_size], digits) + " (full model)"
            ms = [seed["ms"][n] for seed in seeds]
            step = f"{mean(one['step'] for one in ms):.2f}" if "step" in ms[0] else "-"
            times = [f"{mean(one['forward'] for one in ms):.1f}", step, f"{seeds[0]['state bytes'][n]:,}"]
            rows.append([f"{name}, {seeds[0]['measure']}", n, *cells, *times])
    header = ["task", "states", *ARMS, "forward, ms", "decoding step, ms", "state, bytes"]
    counts = sorted({len(seeds) for seeds in tasks.values()})
    tables = {"answer": [answer(tasks)], "table": markdown_table(header, rows), "misses": [misses(tasks)]}
    write_tables(path, tables | {"seeds": [f"Seeds: {' to '.join(map(str, counts))}."]})
