"""`python -m benchmarks.scale [--json FILE]`: how the cost of a training step and of a run grows, as slopes.

A step of Vim with `inf-ssm-exact`, the old model's forward included, on one thread; each quantity is doubled a few
times while the others stay. The slope is the exponent p of time ~ quantity^p between the last two points: 1 is
proportional, 2 is quadratic, 0 is free. Processor time, the best of several steps, so that other work on the machine
counts little. Then whole runs of digits by the number of tasks.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import infssm
from benchmarks.kernels.measure import Method, interleaved
from benchmarks.kernels.steps import Trained
from benchmarks.pages import write_json

BASE: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_classes": 10, "batch": 8}
SWEPT: dict[str, tuple[str, list[int]]] = {
    "batch": ("images per step", [8, 16, 32]),
    "img_size": ("tokens", [16, 32, 64, 128]),
    "depth": ("layers", [2, 4, 8]),
    "embed_dim": ("width", [64, 128, 256, 512]),
    "num_classes": ("classes", [10, 100, 1000]),
}
TASKS = [1, 2, 5, 10]


class Line(NamedTuple):
    """Milliseconds of processor time by quantity, and the exponent between the last two."""

    what: str
    quantities: list[int]
    milliseconds: list[float]
    slope: float


def step_time(repeats: int, **changes: int) -> float:
    options = BASE | changes
    shape = (options.pop("batch"), 3, options["img_size"], options["img_size"])
    trained = Trained({"name": "vim_nano", "options": options, "shape": shape}, "inf-ssm-exact")
    return interleaved({"step": Method(trained.step)}, repeats, time.process_time)["step"].best


def slope(quantities: list[int], times: list[float]) -> float:
    return math.log(times[-1] / times[-2]) / math.log(quantities[-1] / quantities[-2])


def steps(repeats: int) -> list[Line]:
    lines = []
    for option, (what, values) in SWEPT.items():
        times = [step_time(repeats, **{option: value}) for value in values]
        quantities = [(value // BASE["patch_size"]) ** 2 for value in values] if option == "img_size" else values
        lines.append(Line(what, quantities, times, slope(quantities, times)))
    return lines


def runs() -> Line:
    """The same images and epochs in more and more tasks: training costs the same, testing grows."""
    times = []
    for tasks in [TASKS[0], *TASKS]:  # the first one imports what it needs
        with tempfile.TemporaryDirectory() as out:
            values = {"data": {"name": "digits", "num_tasks": tasks}, "method": "lwf-ac", "model": "vim_nano"}
            settings = ["train.epochs=1", "model.options.depth=2", "model.options.embed_dim=32", "train.threads=1"]
            begun = time.process_time()
            infssm.run(values, out=out, overrides=settings)
            times.append(1e3 * (time.process_time() - begun))
    return Line("tasks, a whole run of digits", TASKS, times[1:], slope(TASKS, times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--repeats", type=int, default=5, help="steps timed at each point")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [*steps(options.repeats), runs()]
    print("| quantity | values | ms of processor time | slope |\n|---|---|---|---|")
    for line in lines:
        times = ", ".join(f"{t:.0f}" for t in line.milliseconds)
        print(f"| {line.what} | {', '.join(map(str, line.quantities))} | {times} | {line.slope:.2f} |")
    if options.json:
        write_json(options.json, [line._asdict() for line in lines])


if __name__ == "__main__":
    main()
