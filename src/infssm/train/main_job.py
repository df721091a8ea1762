"""The main job: several methods on digits from one task-0 model, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infssm._files import write_text
from infssm.runs import Comparison, RunDirectory, compare, render
from infssm.train.config import RunConfig
from infssm.train.result import Result
from infssm.train.running import run

MAIN_JOB: Mapping[str, Any] = {
    "data": {"name": "digits", "num_tasks": 5},
    "model": {"name": "vim_nano", "options": {"patch_size": 2, "embed_dim": 64, "depth": 4}},
    "train": {
        "epochs": 6,
        "task0_epochs": 12,
        "batch_size": 32,
        "lr": 1e-3,
        "weight_decay": 0.05,
        "threads": 1,
        "select_best": False,
    },
}
"""Set-up of ``infssm run`` without arguments: five tasks of two digits each, 8 x 8 pixels.

One thread: the model is so small that threads would wait for each other longer than they work.
"""

MAIN_METHODS: tuple[Mapping[str, Any], ...] = (
    {"name": "seq"},
    {"name": "lwf-ac", "weight": 1e5},
    {"name": "inf-ssm", "weight": 1.0},
    {"name": "inf-ssm-exact"},
)
"""Methods of the main job; the first trains task 0 for all.

lwf-ac and inf-ssm have the weights with the best AA on validation images (docs/results/digits.md); inf-ssm-exact finds
its own.
"""


def run_side_by_side(configs: Sequence[RunConfig], *, overwrite: bool = False, quiet: bool = False) -> list[Result]:
    """Run configurations one after the other; the first trains task 0, the others start from its task-0 weights.

    So all share the accuracy on task 0, and differ only in what they do to keep it (the protocol of the release).
    """
    results: list[Result] = []
    for config in configs:
        if results:
            start = RunDirectory(results[0].path.resolve()).weights_path(0)
            config = config.model_copy(update={"train": config.train.model_copy(update={"task0": str(start)})})
        results.append(run(config, overwrite=overwrite, quiet=quiet))
    return results


def write_comparison(results: Sequence[Result], folder: Path) -> tuple[Comparison, Path]:
    """Write ``comparison.html``, ``.md``, ``.csv`` and ``.tex`` to ``folder``; return the data and the HTML's path."""
    comparison = compare([RunDirectory(result.path) for result in results])
    folder.mkdir(parents=True, exist_ok=True)
    for form in ("html", "md", "csv", "tex"):
        write_text(folder / f"comparison.{form}", render(comparison, form))
    return comparison, folder / "comparison.html"
