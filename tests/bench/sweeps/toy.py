"""A search of seconds: runs of one task-0 step or two on a few digits; and one that dies on the way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from infssm.bench.executors import InProcess
from infssm.bench.sweeps import Sweep
from infssm.bench.sweeps import trials as _trials
from infssm.learner.loop import Loop
from tests.learner.tiny import TINY

SEARCHED = ["train.lr=log:1e-4..1e-1", "train.weight_decay=0.0,0.05,0.1"]
SOURCE = {**TINY, "method": "seq", "train": {**TINY["train"], "epochs": 1, "limit_batches": 2, "select_best": False}}
TRIALS = 7


def toy(out: Path | str, overrides: Any = SEARCHED, **changes: Any) -> Sweep:
    _trials.STARTUP = 3  # so that a few trials are enough for the others to be proposed from what was found
    return Sweep(SOURCE, overrides, out=str(out), **changes)


def killed_in(step: int) -> None:
    """Kill this process in the given step of all the steps it does."""
    original, steps = Loop.step, 0

    def counted(self: Loop, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    Loop.step = counted  # type: ignore[method-assign]


def main(out: str, step: str) -> None:
    """Search in ``out``; die in step ``step``, or not at all where that is 0."""
    torch.set_num_threads(1)
    if int(step):
        killed_in(int(step))
    toy(out).run(InProcess(), trials=TRIALS, quiet=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
