"""A worker of torchrun that dies once: ``python -m tests.learner.elastic CONFIG NOTES STEP`` under torchrun.

The last process is killed in step STEP of its first life. Every life notes the step at which it began, in the folder
NOTES.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from infssm.cli.app import invoke
from infssm.learner.loop import Loop
from tests.learner.dying import in_step


def main(config: str, notes: str, step: str) -> int:
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    note = Path(notes) / f"rank{rank}-life{life}"
    original = Loop.train

    def noted(self: Loop, *args: Any) -> None:
        note.write_text(f"{self.progress.position.at} of {self.fabric.world_size}")
        original(self, *args)

    Loop.train = noted  # type: ignore[method-assign]
    if rank == int(os.environ["WORLD_SIZE"]) - 1 and life == 0:
        in_step(int(step))
    return invoke(["run", "-c", config, "--quiet"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
