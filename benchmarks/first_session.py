"""`python -m benchmarks.first_session`: pre-trained weights as they are, tuned on task 0, or both side by side.

Digits in five tasks from the package's Omniglot weights; three seeds; test images. No setting is searched. Writes
`docs/results/first-session.json` and the table of `docs/results/first-session.md`. Two minutes of one core alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.pages import RESULTS, markdown_table, spread, write_json, write_table
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
PAGE = RESULTS / "first-session.md"


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


def table(rows: dict[str, dict[str, list[float]]]) -> list[str]:
    """Markdown: one line per model."""
    header = ["features of", *(f"`frozen+{head}`" for head in HEADS)]
    return markdown_table(header, [[model, *map(spread, heads.values())] for model, heads in rows.items()])


def main() -> None:
    """Measure and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/first-session"), help="folder of the runs")
    rows = measure(parser.parse_args().out)
    write_json(PAGE.with_suffix(".json"), rows)
    write_table(PAGE, table(rows))


if __name__ == "__main__":
    main()
