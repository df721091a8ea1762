"""``infssm predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option("--top", min=1, help="How many classes to show.")] = 3,
    task: Annotated[int | None, typer.Option("--task", help="The model as it was after this task (0-based).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per image.")] = False,
) -> None:
    """Classify images with the model of a run.

    Examples:

    - `infssm predict runs/digits-5/seq/vim_nano/seed0-1a2b3c4d seven.png`

    - `infssm predict RUN photos/*.jpg --top 1 --json > classes.jsonl`
    """
    from infssm.learner.predict import load

    classifier = load(run, task=task)
    for path in images:
        found = classifier.predict(path)
        best = dict(list(found.probabilities.items())[:top])
        if as_json:
            typer.echo(json.dumps({"image": str(path), "label": found.label, "probabilities": best}))
        else:
            typer.echo(f"{path}: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in best.items()))
