"""`python -m benchmarks.first_session`: pre-trained weights as they are, tuned on task 0, or both side by side.

Digits in five tasks from the package's Omniglot weights; three seeds; test images. No setting is searched. Writes
`docs/results/first-session.json` and the table of `docs/results/first-session.md`. Two minutes of one core alone.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from infssm.bench.presets import load_preset
from infssm.bench.running import run
from infssm.learner.config.load import load_config, merge

PRESET = "digits/5-task/frozen+gda"
SEEDS = (0, 10, 100)
MODELS: dict[str, dict[str, Any]] = {
    "as pre-trained (`train.task0=skip`)": {"train": {"task0": "skip"}},
    "tuned on task 0": {},
    "both (`method.start_model=true`)": {"method": {"start_model": True}},
}
HEADS = ("ncm", "gda", "ranpac")
PAGE = Path(__file__).parents[1] / "docs" / "results" / "first-session.md"


def measure(out: Path) -> dict[str, dict[str, list[float]]]:
    """AA in percent by model and head, one number per seed."""
    rows: dict[str, dict[str, list[float]]] = {}
    for model, changes in MODELS.items():
        for head in HEADS:
            found = []
            for seed in SEEDS:
                common = {"seed": seed, "out": str(out), "train": {"threads": 1, "accelerator": "cpu"}}
                values = merge(load_preset(PRESET).values, common)
                values = merge(values, {"method": {"name": f"frozen+{head}"}})
                found.append(100 * run(load_config(merge(values, changes)), quiet=True).aa)
            rows.setdefault(model, {})[head] = found
    return rows


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: one line per model."""
    lines = [f"| features of | {' | '.join(f'`frozen+{head}`' for head in HEADS)} |", "|---" * (1 + len(HEADS)) + "|"]
    for model, heads in rows.items():
        cells = [f"{statistics.mean(v):.1f} ± {statistics.stdev(v):.1f}" for v in heads.values()]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/first-session"), help="folder of the runs")
    rows = measure(parser.parse_args().out)
    PAGE.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    text = PAGE.read_text()
    PAGE.write_text(re.sub(r"(<!-- table -->\n).*?(?=\n<!-- end -->)", lambda m: m[1] + table(rows), text, flags=re.S))


if __name__ == "__main__":
    main()
