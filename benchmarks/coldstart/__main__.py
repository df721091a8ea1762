"""`python -m benchmarks.coldstart --data-root FOLDER`: do features that go on learning beat frozen ones from scratch?

CIFAR-100 in 5 and in 10 equal tasks (presets `cifar100/cold-5` and `cold-10`) with part of the images, so that one
core can train it. Two tables: the presets' arms as `infssm run` trains them, and a search over regularizers and heads
(`search.py`). All arms of a stream and seed share their task-0 model. Results are kept in `--out`, so a stopped command
goes on where it was. Writes `docs/results/cold-start.json` and the tables of `docs/results/cold-start.md`.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from benchmarks.coldstart.search import FROZEN, GRID, Setting, Stream, chosen_setting, head_settings, test, train
from benchmarks.pages import (
    RESULTS,
    machine,
    markdown_table,
    paired_gain,
    read_json,
    remembered,
    spread,
    write_json,
    write_table,
)
from infssm.bench.presets import load_preset
from infssm.bench.running import run
from infssm.learner.config.load import load_config, merge

STREAMS = ("cold-5", "cold-10")
SEEDS = (0, 10, 100)
PER_CLASS = {"train_per_class": 100, "test_per_class": 50}
LAST_BLOCK = {"blocks": None, "token_spread": False, "beta": 0.75}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "`frozen+gda`, last block": ("frozen+gda", LAST_BLOCK),
    "`frozen+gda`, first block": ("frozen+gda", {}),
    "`lwf-f+gda`, last block": ("lwf-f+gda", LAST_BLOCK),
}
"""Rows of the table: an arm of the presets, and what differs from its settings there."""
PLAIN = next(iter(ARMS))
FIRST = "frozen+gda"
HEADS = ("gda", "gda, two", "lda", "ncm", "ranpac", "gda, first block", "gda, first block, two")
PAGE = RESULTS / "cold-start.md"


def settings(stream: str, seed: int, arm: str, out: Path, root: str | None) -> dict[str, Any]:
    """The preset's settings of an arm, with part of the images."""
    common = {
        "seed": seed,
        "out": str(out),
        "data": {"root": root, **PER_CLASS},
        "train": {"threads": 1, "accelerator": "cpu"},
    }
    return merge(load_preset(f"cifar100/{stream}/{arm}").values, common)


def outcome(values: dict[str, Any]) -> dict[str, float]:
    """AA and task-incremental AA in percent on test images."""
    found = run(load_config(values), quiet=True).matrix
    return {"aa": 100 * found.aa, "task_incremental": 100 * found.task_incremental.aa}


def table(found: dict[str, Any]) -> list[str]:
    """One line per stream and arm: AA, and its difference from the last block's frozen features of the same seeds."""
    rows = []
    for stream in STREAMS:
        for arm in ARMS:
            seeds = [seed for seed in SEEDS if all(f"{stream}/{seed}/{name}" in found for name in (arm, PLAIN))]
            if not seeds:
                continue
            mine, plain = ([found[f"{stream}/{seed}/{name}"]["aa"] for seed in seeds] for name in (arm, PLAIN))
            within = [found[f"{stream}/{seed}/{arm}"]["task_incremental"] for seed in seeds]
            gain = "" if arm == PLAIN else difference(mine, plain)
            rows.append([stream, arm, str(len(seeds)), spread(mine), gain, spread(within)])
    header = ("stream", "arm", "seeds", "AA", "gain over the last block", "task-incremental AA")
    return markdown_table(header, rows, numbers=4)


def difference(mine: list[float], others: list[float]) -> str:
    """Paired by seed, with its standard error where there are several."""
    return paired_gain(mine, others) if len(mine) > 1 else f"{mine[0] - others[0]:+.1f}"


def searched_table(found: dict[str, Any]) -> list[str]:
    """One line per stream and arm: rate, weight, seeds and the test AA of every head."""
    rows = []
    for stream in STREAMS:
        for arm in (FROZEN, *GRID):
            mine = [found[key] for seed in SEEDS if (key := f"{stream}/{seed}/{arm}") in found]
            if mine:
                setting = Setting(*mine[0]["setting"])
                weight = "" if setting.weight is None else f"{setting.weight:g}"
                rate = "" if arm == FROZEN else f"{setting.rate:g}"
                heads = [spread([one[head] for one in mine]) for head in HEADS]
                rows.append([stream, arm, rate, weight, str(len(mine)), *heads])
    return markdown_table(("stream", "arm", "rate", "weight", "seeds", *HEADS), rows, numbers=10)


def main() -> None:
    """Measure what is missing, then write the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/cold-start"), help="folder of the runs")
    parser.add_argument("--data-root", help="folder that holds CIFAR-100")
    parser.add_argument("--streams", nargs="*", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--searched", nargs="*", choices=STREAMS, default=list(STREAMS), help="streams of the search")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    options = parser.parse_args()
    out, root = options.out, options.data_root
    kept = out / "found.json"
    for stream, seed, row in itertools.product(options.streams, options.seeds, ARMS):
        arm, changes = ARMS[row]
        values = merge(settings(stream, seed, arm, out, root), {"method": changes})
        remembered(kept, lambda values=values: outcome(values), f"{stream}/{seed}/{row}")
    for stream, seed, arm in itertools.product(options.searched, options.seeds, (FROZEN, *GRID)):
        arguments = (stream, seed, arm, out, root)
        remembered(out / "searched.json", lambda given=arguments: searched(*given), f"{stream}/{seed}/{arm}")
    found, search = read_json(kept), read_json(out / "searched.json")
    write_json(PAGE.with_suffix(".json"), PER_CLASS | {"machine": machine(), "found": found, "searched": search})
    write_table(PAGE, table(found))
    write_table(PAGE, searched_table(search), "searched")


def searched(name: str, seed: int, arm: str, out: Path, root: str | None) -> dict[str, Any]:
    """An arm at the rate and weight chosen on the first seed, with every head."""
    streams = {s: Stream(name, s, settings(name, s, FIRST, out, root), out) for s in (SEEDS[0], seed)}
    stream, first = streams[SEEDS[0]], Setting(FROZEN)
    setting = chosen_setting(stream, arm)
    own, other = (
        remembered(stream.file(one).with_suffix(".json"), lambda one=one: head_settings(train(stream, one)))
        for one in (setting, first)
    )
    scores = test(train(streams[seed], setting), train(streams[seed], first), own, other)
    return {"setting": setting, "heads": own, **scores}


if __name__ == "__main__":
    main()
