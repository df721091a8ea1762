"""`python -m benchmarks.coldstart --data-root FOLDER`: do features that go on learning beat frozen ones from scratch?

CIFAR-100 in 5 and in 10 equal tasks (presets `cifar100/cold-5` and `cold-10`) with part of the images, so that one
core can train it. Two tables: the presets' arms as `infssm run` trains them, and a search over regularizers and heads
(`search.py`). All arms of a stream and seed share their task-0 model. Results are kept in `--out`, so a stopped command
goes on where it was. Writes `docs/results/cold-start.json` and the tables of `docs/results/cold-start.md`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.coldstart.search import ARMS as SEARCHED
from benchmarks.coldstart.search import FROZEN, Setting, Stream, chosen_setting, head_settings, test, train
from benchmarks.pages import RESULTS, machine, markdown_table, paired_gain, read_json, spread, write_json, write_table
from infssm.bench.presets import load_preset
from infssm.bench.running import run
from infssm.learner.config.load import load_config, merge

STREAMS = ("cold-5", "cold-10")
SEEDS = (0, 10, 100)
PER_CLASS = {"train_per_class": 100, "test_per_class": 50}
ARMS = ("frozen+gda", "lwf-f+gda")
HEADS = ("gda", "lda", "ncm", "ranpac", "two")
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
    """One line per stream and arm: AA, and its difference from frozen features of the same seeds."""
    rows = []
    for stream in STREAMS:
        seeds = [seed for seed in SEEDS if all(f"{stream}/{seed}/{arm}" in found for arm in ARMS)]
        for arm in ARMS if seeds else ():
            mine, frozen = ([found[f"{stream}/{seed}/{name}"]["aa"] for seed in seeds] for name in (arm, ARMS[0]))
            within = [found[f"{stream}/{seed}/{arm}"]["task_incremental"] for seed in seeds]
            gain = "" if arm == ARMS[0] else difference(mine, frozen)
            rows.append([stream, f"`{arm}`", str(len(seeds)), spread(mine), gain, spread(within)])
    header = ("stream", "arm", "seeds", "AA", "gain over `frozen+gda`", "task-incremental AA")
    return markdown_table(header, rows, numbers=4)


def difference(mine: list[float], others: list[float]) -> str:
    """Paired by seed, with its standard error where there are several."""
    return paired_gain(mine, others) if len(mine) > 1 else f"{mine[0] - others[0]:+.1f}"


def searched_table(found: dict[str, Any]) -> list[str]:
    """One line per stream and arm: test AA of every head, and what the better of two columns gains over frozen."""
    rows = []
    for stream in STREAMS:
        for arm in (FROZEN, *SEARCHED):
            seeds = [s for s in SEEDS if f"{stream}/{s}/{arm}" in found and f"{stream}/{s}/{FROZEN}" in found]
            if not seeds:
                continue
            mine, frozen = ([found[f"{stream}/{seed}/{name}"] for seed in seeds] for name in (arm, FROZEN))
            setting = Setting(*mine[0]["setting"])
            weight = "" if setting.weight is None else f"{setting.weight:g}"
            gains = ["", ""]
            if arm != FROZEN:
                gains = [difference([m[h] for m in mine], [f["gda"] for f in frozen]) for h in ("gda", "two")]
            heads = [spread([m[head] for m in mine]) for head in (HEADS if arm != FROZEN else HEADS[:-1])]
            rate = "" if arm == FROZEN else f"{setting.rate:g}"
            rows.append([stream, arm, rate, weight, str(len(seeds)), *heads, *[""] * (5 - len(heads)), *gains])
    header = ("stream", "arm", "rate", "weight", "seeds", *HEADS, "gain, gda", "gain, two")
    return markdown_table(header, rows, numbers=10)


def main() -> None:
    """Measure what is missing, then write the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/cold-start"), help="folder of the runs")
    parser.add_argument("--data-root", help="folder that holds CIFAR-100")
    parser.add_argument("--streams", nargs="*", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    options = parser.parse_args()
    for name in options.streams:
        for seed in options.seeds:
            for arm in ARMS:
                _keep(options, f"{name}/{seed}/{arm}", lambda *a: outcome(settings(*a)), name, seed, arm)
        for seed in options.seeds:
            for arm in (FROZEN, *SEARCHED):
                _keep(options, f"searched/{name}/{seed}/{arm}", _searched, name, seed, arm)
    found = read_json(options.out / "found.json")
    write_json(PAGE.with_suffix(".json"), PER_CLASS | {"machine": machine(), "found": found})
    write_table(PAGE, table(found))
    start = "searched/"
    searched = {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}
    write_table(PAGE, searched_table(searched), "searched")


def _keep(options: argparse.Namespace, key: str, measure: Any, name: str, seed: int, arm: str) -> None:
    """Measure what is not in the file of results yet."""
    path = options.out / "found.json"
    if key not in read_json(path):
        found = measure(name, seed, arm, options.out, options.data_root)
        write_json(path, read_json(path) | {key: found})


def _searched(name: str, seed: int, arm: str, out: Path, root: str | None) -> dict[str, Any]:
    """An arm at the rate and weight chosen on the first seed, with every head."""
    searched, stream = (Stream(name, s, settings(name, s, ARMS[0], out, root), out) for s in (SEEDS[0], seed))
    setting, first = chosen_setting(searched, arm), Setting(FROZEN)
    shrinkage = head_settings(train(searched, setting), train(searched, first))
    return {"setting": setting, "heads": shrinkage} | test(train(stream, setting), train(stream, first), shrinkage)


if __name__ == "__main__":
    main()
