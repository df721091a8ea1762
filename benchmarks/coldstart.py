"""`python -m benchmarks.coldstart --data-root FOLDER`: do features that go on learning beat frozen ones from scratch?

CIFAR-100 in 5 and in 10 equal tasks (presets `cifar100/cold-5` and `cold-10`) with part of the images, so that one
core can train it. Both arms of a stream and seed share their task-0 model, augmentation, rate and epochs. Results are
kept in `--out`, so a stopped command goes on where it was. Writes `docs/results/cold-start.json` and the table of
`docs/results/cold-start.md`. About 4 minutes of one core for each stream and seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.pages import RESULTS, machine, markdown_table, paired_gain, read_json, spread, write_json, write_table
from infssm.bench.presets import load_preset
from infssm.bench.running import run
from infssm.learner.config.load import load_config, merge

STREAMS = ("cold-5", "cold-10")
SEEDS = (0, 10, 100)
PER_CLASS = {"train_per_class": 100, "test_per_class": 50}
ARMS = ("frozen+gda", "lwf-f+gda")
PAGE = RESULTS / "cold-start.md"


def outcome(stream: str, seed: int, arm: str, out: Path, root: str | None) -> dict[str, float]:
    """AA and task-incremental AA in percent on test images, with the preset's settings of the arm."""
    common = {
        "seed": seed,
        "out": str(out),
        "data": {"root": root, **PER_CLASS},
        "train": {"threads": 1, "accelerator": "cpu"},
    }
    values = merge(load_preset(f"cifar100/{stream}/{arm}").values, common)
    found = run(load_config(values), quiet=True).matrix
    return {"aa": 100 * found.aa, "task_incremental": 100 * found.task_incremental.aa}


def table(found: dict[str, Any]) -> list[str]:
    """One line per stream and arm: AA, and its difference from frozen features of the same seeds."""
    rows = []
    for stream in STREAMS:
        seeds = [seed for seed in SEEDS if all(f"{stream}/{seed}/{arm}" in found for arm in ARMS)]
        for arm in ARMS if seeds else ():
            mine, frozen = ([found[f"{stream}/{seed}/{name}"]["aa"] for seed in seeds] for name in (arm, ARMS[0]))
            within = [found[f"{stream}/{seed}/{arm}"]["task_incremental"] for seed in seeds]
            several = paired_gain(mine, frozen) if len(seeds) > 1 else f"{mine[0] - frozen[0]:+.1f}"
            gain = "" if arm == ARMS[0] else several
            rows.append([stream, f"`{arm}`", str(len(seeds)), spread(mine), gain, spread(within)])
    header = ("stream", "arm", "seeds", "AA", "gain over `frozen+gda`", "task-incremental AA")
    return markdown_table(header, rows, numbers=4)


def main() -> None:
    """Measure what is missing, then write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/cold-start"), help="folder of the runs")
    parser.add_argument("--data-root", help="folder that holds CIFAR-100")
    parser.add_argument("--streams", nargs="*", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    options = parser.parse_args()
    kept = options.out / "found.json"
    for stream in options.streams:
        for seed in options.seeds:
            for arm in ARMS:
                known, key = read_json(kept), f"{stream}/{seed}/{arm}"
                if key not in known:
                    found = outcome(stream, seed, arm, options.out, options.data_root)
                    write_json(kept, known | {key: found})
    found = read_json(kept)
    write_json(PAGE.with_suffix(".json"), PER_CLASS | {"machine": machine(), "found": found})
    write_table(PAGE, table(found))


if __name__ == "__main__":
    main()
