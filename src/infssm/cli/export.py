"""``infssm export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infssm.errors import ConfigError


def command(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    to: Annotated[str, typer.Option("--to", help="onnx, or torch (torch.export's .pt2).")] = "onnx",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write.")] = None,
    task: Annotated[int | None, typer.Option("--task", help="The model as it was after this task (0-based).")] = None,
) -> None:
    """Write the model of a run as a file that runs without infssm, and check that it gives the same answers.

    Examples:

    - `infssm export runs/digits-5/seq/vim_nano/seed0-1a2b3c4d` — writes model.onnx

    - `infssm export RUN --to torch -o model.pt2`
    """
    from infssm.learner.export import export_classifier
    from infssm.learner.predict import load

    if to not in ("onnx", "torch"):
        raise ConfigError(f"--to {to}: a model is exported to onnx or to torch")
    path = output or Path("model.onnx" if to == "onnx" else "model.pt2")
    if path.exists():
        raise ConfigError(f"{path} exists: choose another file with -o")
    typer.echo("exporting: this takes a minute or two (every step of the scan becomes part of the graph)", err=True)
    difference = export_classifier(load(run, task=task), path, "onnx" if to == "onnx" else "torch")
    typer.echo(f"wrote {path}; its logits equal the model's to {difference:.1e}")
