"""`python -m benchmarks.fewshot`: heads without exemplars on few-shot CIFAR-100: 60 classes, then 8 times 5 x 5 images.

The preset's protocol in the class order of the packaged weights `cifar100-base`, which know 50 of the 60 base classes
and no later one; task 0 trains on from them. Three seeds, no search. Writes `docs/results/few-shot.json` and the table
of `docs/results/few-shot.md`. A quarter of an hour of one core; runs that are complete are read again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.pages import markdown_table, spread
from benchmarks.presets import SEEDS, make_page, result

HEADS = ("frozen+ncm", "frozen+gda", "frozen+etf")
CHANGES: dict[str, Any] = {
    "data": {"class_order_seed": 0, "shots": 5, "test_per_class": 50},
    "model": {"classes": "all", "weights": "cifar100-base"},  # all, as etf needs, so that the heads share base models
    "train": {"task0_epochs": 4},
}


def measure(name: str, out: Path) -> list[dict[str, Any]]:
    """By seed: session accuracies, over all test images of the classes so far, and what follows; in percent."""
    rows = []
    for seed in SEEDS:
        found = result(f"cifar100/fscil/{name}", out, seed, CHANGES).matrix.class_incremental
        last = found.values[-1]
        rows.append(
            {
                "sessions": [100 * float(v) for v in found.weighted_aa_curve],
                "base": 100 * float(last[0]),
                "new": 100 * float((last[1:] * found.samples[1:]).sum() / found.samples[1:].sum()),
                "harmonic": 100 * found.harmonic,
            }
        )
    return rows


def table(rows: dict[str, Any]) -> list[str]:
    """One line per head."""
    lines = []
    for name, seeds in rows.items():
        sessions = zip(*(one["sessions"] for one in seeds), strict=True)
        cells = [*sessions, *([one[key] for one in seeds] for key in ("base", "new", "harmonic"))]
        lines.append([f"`{name}`", *(spread(list(cell)) for cell in cells)])
    return markdown_table(["head", *map(str, range(9)), "base", "new", "harmonic"], lines)


if __name__ == "__main__":
    make_page("few-shot", __doc__, HEADS, measure, table)
