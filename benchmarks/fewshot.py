"""`python -m benchmarks.fewshot`: heads without exemplars on few-shot CIFAR-100: 60 classes, then 8 times 5 x 5 images.

The preset's stream and list of images with a base model that is trained for a short time on a part of the base classes'
images. One seed, no search. Writes `docs/results/few-shot.json` and the table of `docs/results/few-shot.md`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from infssm.bench.presets import load_preset
from infssm.bench.running import run
from infssm.learner.config.load import load_config, merge

HEADS = ("frozen+ncm", "frozen+gda", "frozen+etf")
SMALL: dict[str, Any] = {
    "data": {"train_per_class": 60, "test_per_class": 10},
    "model": {"classes": "all"},  # as etf needs, so that all heads share one base model
    "train": {"task0_epochs": 5, "threads": 1, "accelerator": "cpu"},
}
PAGE = Path(__file__).parents[1] / "docs" / "results" / "few-shot.md"


def measure(out: Path) -> dict[str, Any]:
    """Session accuracies, over all test images of the classes so far, and what follows from them; in percent."""
    rows = {}
    for name in HEADS:
        values = merge(load_preset(f"cifar100/fscil/{name}").values, merge(SMALL, {"out": str(out)}))
        found = run(load_config(values), quiet=True).matrix.class_incremental
        last = found.values[-1]
        rows[name] = {
            "sessions": [100 * float(v) for v in found.weighted_aa_curve],
            "base": 100 * float(last[0]),
            "new": 100 * float((last[1:] * found.samples[1:]).sum() / found.samples[1:].sum()),
            "harmonic": 100 * found.harmonic,
        }
    return rows


def table(rows: dict[str, Any]) -> str:
    """Markdown: one line per head."""
    count = len(next(iter(rows.values()))["sessions"])
    lines = [f"| head | {' | '.join(map(str, range(count)))} | base | new | harmonic |", "|---" * (count + 4) + "|"]
    for name, row in rows.items():
        cells = [f"{v:.1f}" for v in (*row["sessions"], row["base"], row["new"], row["harmonic"])]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/few-shot"), help="folder of the runs")
    rows = measure(parser.parse_args().out)
    PAGE.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    text = PAGE.read_text()
    PAGE.write_text(re.sub(r"(<!-- table -->\n).*?(?=\n<!-- end -->)", lambda m: m[1] + table(rows), text, flags=re.S))


if __name__ == "__main__":
    main()
