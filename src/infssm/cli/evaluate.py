"""``infssm eval``."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from infssm.cli.importing import Import


def command(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    task: Annotated[
        int | None, typer.Option(help="The model after this task (0-based); the last one unless given.")
    ] = None,
    data_root: Annotated[str | None, typer.Option(help="Folder that holds the data sets.")] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Write what the model says about every sample to this CSV file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Evaluate a saved model again on all tasks it has seen.

    Examples:

    - `infssm eval runs/digits-5/ewc/vim_nano/seed0-3f2a90c1 --task 2`

    - `infssm eval RUN --predictions predictions.csv` — one line per sample: its class and the predicted one
    """
    from infssm._files import write_text
    from infssm.learner.evaluate import Prediction, evaluate_run
    from infssm.learner.scoring import Bits
    from infssm.learner.store.directory import RunDirectory

    said: list[Prediction] | None = None if predictions is None else []
    rows = evaluate_run(run, task, data_root=data_root, predictions=said)
    if predictions is not None and said is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([Prediction._fields, *(p._replace(probability=round(p.probability, 6)) for p in said)])
        write_text(predictions, text.getvalue())
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows]))
        return
    for index, row in enumerate(rows):
        typer.echo(f"task {index}: {_line(row)}")
    mean = sum(row.value for row in rows) / len(rows)
    shown = f"AA {100 * mean:.2f} %"
    if isinstance(rows[0], Bits):
        shown = f"mean {mean:.3f} bits per {'byte' if rows[0].bytes else 'token'}"
    validation = RunDirectory(run).config()["data"].get("evaluate") == "val"
    typer.echo(f"{shown}, on validation data" if validation else shown)
    if predictions is not None:
        typer.echo(f"wrote {predictions}")


def _line(row: Any) -> str:
    """What was reached on a task."""
    if hasattr(row, "perplexity"):
        per_byte = f"{row.bits_per_byte:.3f} bits per byte, " if row.bytes else ""
        counts = f"{row.tokens:,} tokens" + (f", {row.bytes:,} bytes" if row.bytes else "")
        return f"{per_byte}{row.bits_per_token:.3f} bits per token, perplexity {row.perplexity:.2f}   ({counts})"
    return (
        f"{100 * row.class_incremental:6.2f} %   inside the task {100 * row.task_incremental:6.2f} %"
        f"   ({row.images} images)"
    )
