"""Several methods from one task-0 model, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infssm._files import write_text
from infssm.runs import Comparison, RunDirectory, compare, render
from infssm.train.config import RunConfig
from infssm.train.result import Result
from infssm.train.running import run


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
