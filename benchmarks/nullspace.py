"""`python -m benchmarks.nullspace`: what the null space of Mamba-CL adds to a smaller learning rate.

Plain training, `nullspace` with its three projections, `lwf` and `frozen+gda`, all from the same task-0
models. The learning rate of every arm is chosen among the same values by AA on validation data of the first seed.
Writes `docs/results/nullspace.json` and the table of `docs/results/nullspace.md`. About an hour of one core; parts that
are done are read again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import markdown_table, spread
from benchmarks.presets import SEEDS, make_page, result
from infssm.learner.config.load import merge


class Stream(NamedTuple):
    """A preset, what is changed of it, the learning rates searched, and the head that every arm has."""

    preset: str
    rates: tuple[float, ...]
    changes: dict[str, Any]
    head: str = ""


STREAMS = {
    "digits": Stream("digits/5-task/seq", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), {}),
    "speech": Stream("speech-digits/classes/seq", (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), {}),
    # A part of the images, and task 0 from the package's weights, so that one core is enough.
    "CIFAR-100": Stream(
        "cifar100/b50-5/seq",
        (1e-4, 3e-4, 1e-3, 3e-3),
        {
            "data": {"train_per_class": 60, "test_per_class": 25},
            "train": {"task0": "cifar100-base", "epochs": 5, "batch_size": 30, "lr_scale": 1.0},
        },
        "gda",
    ),
}
FROZEN = "`frozen+gda`: no training after task 0"
ARMS: dict[str, dict[str, Any]] = {
    "plain training (`seq`)": {"name": "seq"},
    "`projection=rate`: smaller steps, no projection": {"name": "nullspace", "projection": "rate"},
    "`projection=released`: the authors' scaling": {"name": "nullspace", "projection": "released"},
    "`projection=projector`: the true projector": {"name": "nullspace", "projection": "projector"},
    "`lwf`": {"name": "lwf"},
    FROZEN: {"name": "frozen"},
}


def outcome(stream: Stream, out: Path, arm: dict[str, Any], rate: float | None, seed: int, part: str) -> dict[str, Any]:
    """AA, task-incremental AA and FM in percent, from the task-0 model that plain training made with the preset."""
    changes = stream.changes
    if "task0" not in changes.get("train", {}):
        first = result(stream.preset, out, seed, changes)
        weights = str(first.path / "checkpoints" / "task_00.safetensors")
        changes = merge(changes, {"train": {"task0": weights}})
    head = "gda" if arm["name"] == "frozen" else stream.head
    method = {**arm, "name": f"{arm['name']}+{head}" if head else arm["name"]}
    if stream.head:
        method["prior"] = "task"  # task 0 has more classes than the others
    changed = {"method": method, "data": {"evaluate": part}, "train": {} if rate is None else {"lr": rate}}
    found = result(stream.preset, out, seed, changes, changed).matrix
    return {"aa": 100 * found.aa, "task_incremental": 100 * found.task_incremental.aa, "fm": 100 * found.fm()}


def measure(name: str, out: Path) -> dict[str, Any]:
    stream, rows = STREAMS[name], {}
    for title, arm in ARMS.items():
        rate, search = None, {}
        if title != FROZEN:
            search = {rate: outcome(stream, out, arm, rate, SEEDS[0], "val")["aa"] for rate in stream.rates}
            rate = max(search, key=search.__getitem__)
        tests = [outcome(stream, out, arm, rate, seed, "test") for seed in SEEDS]
        rows[title] = {"rate": rate, "validation": search, "test": tests}
    return rows


def table(rows: dict[str, Any]) -> list[str]:
    """One line per stream and arm."""
    lines = []
    for stream, arms in rows.items():
        for name, row in arms.items():
            cells = [spread([test[key] for test in row["test"]]) for key in ("aa", "task_incremental", "fm")]
            lines.append([stream, name, "-" if row["rate"] is None else f"{row['rate']:g}", *cells])
    return markdown_table(["stream", "arm", "learning rate", "AA", "task-incremental AA", "FM"], lines)


if __name__ == "__main__":
    make_page("nullspace", __doc__, list(STREAMS), measure, table)
