"""``infssm export`` and ``compress``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from infssm.cli.options import AfterTask, Folder, Import
from infssm.errors import ConfigError, DataError


def export(
    folder: Folder,
    to: Annotated[str, typer.Option("--to", help="onnx, or torch (torch.export's .pt2).")] = "onnx",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write.")] = None,
    task: AfterTask = None,
    check: Annotated[
        list[Path] | None,
        typer.Option("--check", help="A raw file to run through the ONNX file and compare with `infssm predict`."),
    ] = None,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Write a learner or the model of a run as a file that runs without infssm; check that its outputs are equal.

    An ONNX file takes raw input: images of any size, waveforms, series of any length. Resizing, normalisation and
    frequency bands are part of its graph. That of a learner also gives calibrated probabilities and whether a sample is
    like any known class. The command prints the Python lines that use it.

    Examples:

    - `infssm export my-learner -o mine.onnx`

    - `infssm export runs/digits-5/seq/vim_nano/seed0-1a2b3c4d` — writes model.onnx

    - `infssm export RUN -o photos.onnx --check cat.jpg --check dog.jpg` — compares from the raw files

    - `infssm export RUN --to torch -o model.pt2`
    """
    from infssm.learner.export import check_export, export_classifier, usage
    from infssm.learner.learner import load
    from infssm.learner.predict import TrainedClassifier

    if to not in ("onnx", "torch"):
        raise ConfigError(f"--to {to}: a model is exported to onnx or to torch")
    if check and to != "onnx":
        raise ConfigError("--check runs an ONNX file: leave it out, or export --to onnx")
    path = output or Path("model.onnx" if to == "onnx" else "model.pt2")
    if path.exists():
        raise ConfigError(f"{path} exists: choose another file with -o")
    found = load(folder, task=task)
    classifier = found if isinstance(found, TrainedClassifier) else found.classifier
    begun = time.monotonic()

    def tell(stage: str) -> None:
        typer.echo(f"{time.monotonic() - begun:5.1f} s  {stage} ...", err=True)

    difference = export_classifier(classifier, path, "onnx" if to == "onnx" else "torch", progress=tell)
    typer.echo(f"wrote {path}; its logits equal the model's to {difference:.1e}")
    for file in check or ():
        typer.echo(f"{file}: equal to `infssm predict` to {check_export(classifier, path, [file]):.1e}")
    if to == "onnx":
        typer.echo(f"\nto use it:\n\n{usage(classifier, path)}", nl=False)


_BATCH = 32


def compress(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a run.")],
    data: Annotated[Path, typer.Argument(help="A folder of samples (images, sounds or series); no labels are needed.")],
    out: Annotated[Path, typer.Option(help="Folder to write the small model to.")],
    states: Annotated[int | None, typer.Option(help="States per layer to keep.")] = None,
    share: Annotated[float | None, typer.Option(help="Share of the states to keep, instead of --states.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps towards the large model.")] = 100,
    samples: Annotated[int, typer.Option(help="Most files of DATA to use.")] = 1024,
) -> None:
    """Write a model with fewer states per layer, trained to reproduce the model of a run.

    States are ranked by the energy that each adds to a layer's output on DATA; the best are kept, and the small model
    is trained towards the outputs and the states of the large one. OUT is a model as `create_model` builds it: load it
    with `infssm.models.from_pretrained(OUT)`, then train it or `infssm.attach` a method to it. How much accuracy is
    lost depends on the task: compare both models on test data.

    Examples:

    - `infssm compress RUN photos/ --share 0.5 --out small` — half of the states of every layer

    - `infssm compress RUN photos/ --states 8 --out small --steps 400` — a longer training
    """
    from infssm.learner.predict import load_classifier
    from infssm.ssm import compress

    if out.exists():
        raise ConfigError(f"{out} exists already; name a folder that does not")
    if not data.is_dir():
        raise ConfigError(f"there is no folder {data} of samples")
    files = sorted(path for path in data.rglob("*") if path.is_file() and not path.name.startswith("."))
    if not files:
        raise DataError(f"{data} holds no file to score the states on")
    files = files[:: -(-len(files) // samples)]  # from all of the folder, as its parts may be classes
    classifier = load_classifier(run)
    batches = [classifier.transform(list(files[start : start + _BATCH])) for start in range(0, len(files), _BATCH)]
    small = compress(
        classifier.model, data=batches, states=states, share=share, steps=steps, progress=lambda text: typer.echo(text)
    )
    small.save_pretrained(out)
    before, after = (sum(p.numel() for p in model.parameters()) for model in (classifier.model, small))
    typer.echo(f"wrote {out}: {after:,} parameters instead of {before:,}")
