"""`python -m benchmarks.nullspace`: what the null space of Mamba-CL adds to a smaller learning rate.

Plain training and `nullspace` with its three projections, all from the same task-0 models. The learning rate of every
arm is chosen among the same values by AA on validation images of the first seed. Writes `docs/results/nullspace.json`
and the table of `docs/results/nullspace.md`. About 10 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infssm.bench.presets import load_preset
from infssm.bench.running import run
from infssm.learner.config.load import load_config, merge

STREAMS = {"digits": "digits/5-task/seq", "speech": "speech-digits/classes/seq"}
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = (0, 10, 100)
ARMS: dict[str, dict[str, Any]] = {
    "plain training (`seq`)": {"name": "seq"},
    "`projection=rate`: smaller steps, no projection": {"name": "nullspace", "projection": "rate"},
    "`projection=released`: the authors' scaling": {"name": "nullspace", "projection": "released"},
    "`projection=projector`: the true projector": {"name": "nullspace", "projection": "projector"},
}
PAGE = Path(__file__).parents[1] / "docs" / "results" / "nullspace.md"


def outcome(preset: str, out: Path, arm: dict[str, Any], rate: float, seed: int, part: str) -> dict[str, float]:
    """AA and task-incremental AA in percent, from the task-0 model that plain training made with the preset's rate."""
    common = {"seed": seed, "out": str(out), "train": {"threads": 1, "accelerator": "cpu"}}
    base = merge(load_preset(preset).values, common)
    first = run(load_config(base), quiet=True)
    changes = {
        "method": arm,
        "data": {"evaluate": part},
        "train": {"lr": rate, "task0": str(first.path / "checkpoints" / "task_00.safetensors")},
    }
    found = run(load_config(merge(base, changes)), quiet=True).matrix
    return {"aa": 100 * found.aa, "task_incremental": 100 * found.task_incremental.aa, "fm": 100 * found.fm()}


def measure(out: Path, streams: Sequence[str]) -> dict[str, Any]:
    """Every arm on every stream."""
    rows: dict[str, Any] = {}
    for stream in streams:
        preset = STREAMS[stream]
        for name, arm in ARMS.items():
            search = {rate: outcome(preset, out, arm, rate, SEEDS[0], "val")["aa"] for rate in RATES}
            rate = max(search, key=search.__getitem__)
            tests = [outcome(preset, out, arm, rate, seed, "test") for seed in SEEDS]
            rows.setdefault(stream, {})[name] = {"rate": rate, "validation": search, "test": tests}
    return rows


def table(rows: dict[str, Any]) -> str:
    """Markdown: one line per stream and arm."""
    lines = ["| stream | arm | learning rate | AA | task-incremental AA | FM |", "|---|---|---|---|---|---|"]
    for stream, arms in rows.items():
        for name, row in arms.items():
            cells = []
            for key in ("aa", "task_incremental", "fm"):
                values = [test[key] for test in row["test"]]
                cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
            lines.append(f"| {stream} | {name} | {row['rate']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/nullspace"), help="folder of the runs")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    options = parser.parse_args()
    rows = measure(options.out, options.streams)
    PAGE.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    text = PAGE.read_text()
    PAGE.write_text(re.sub(r"(<!-- table -->\n).*?(?=\n<!-- end -->)", lambda m: m[1] + table(rows), text, flags=re.S))


if __name__ == "__main__":
    main()
