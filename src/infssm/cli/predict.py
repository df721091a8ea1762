"""``infssm predict``, ``eval``, ``export`` and ``compress``."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infssm.cli.options import AfterTask, AsJson, DataRoot, Folder, Import
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from infssm.data import SampleFacts


def predict(
    folder: Folder,
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Images, wav files or series; or folders of them.")
    ],
    top: Annotated[int, typer.Option("--top", min=1, help="How many classes to show.")] = 3,
    task: AfterTask = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per sample.")] = False,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Classify images, sounds or series with a learner or the model of a run.

    A learner also marks samples that resemble no class it was taught ("unknown").

    A folder stands for all files in and below it that the model can read. A series is an .npy or .csv file [time,
    width]; an .npz holds many, as for training. Files that cannot be read are listed on stderr, and the others are
    still classified; the exit code is then 3.

    Examples:

    - `infssm predict my-learner cat.jpg`

    - `infssm predict runs/digits-5/seq/vim_nano/seed0-1a2b3c4d seven.png`

    - `infssm predict RUN photos --top 1 --json > classes.jsonl`
    """
    from infssm.learner.learner import load

    model, bad = load(folder, task=task), 0
    for name, sample in _samples(model.samples, paths):
        try:
            if isinstance(sample, DataError):
                raise sample
            found = model.predict(sample)
        except DataError as error:
            bad += 1
            message = str(error) if name in str(error) else f"{name}: {error}"
            typer.echo(f"error: {message}", err=True)
            if as_json:
                typer.echo(json.dumps({"file": name, "error": message}))
            continue
        best = dict(list(found.probabilities.items())[:top])
        if as_json:
            typer.echo(json.dumps({"file": name, "label": found.label, "known": found.known, "probabilities": best}))
        else:
            shown = ", ".join(f"{label} {100 * share:.1f} %" for label, share in best.items())
            typer.echo(f"{name}: {'' if found.known else 'unknown; most like '}{shown}")
    if bad:
        typer.echo(f"{bad} could not be classified", err=True)
        raise typer.Exit(DataError.exit_code)


def _samples(facts: SampleFacts, paths: list[Path]) -> Iterator[tuple[str, Any]]:
    """Names and samples, file by file; for an unreadable file the error that names it, instead of a sample."""
    for path in paths:
        if not path.exists():
            yield str(path), DataError(f"there is no file or folder {path}")
            continue
        files = [path]
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix.lower() in facts.suffixes and f.is_file())
            if not files:
                endings = ", ".join(sorted(facts.suffixes))
                raise ConfigError(f"{path} holds no file that the model can read ({endings})")
        for file in files:
            yield from _content(facts, file).items()


def _content(facts: SampleFacts, file: Path) -> Mapping[str, Any]:
    try:
        return facts.samples_in(file)
    except DataError as error:
        return {str(file): error}


def evaluate(
    folder: Folder,
    data: Annotated[
        str | None,
        typer.Argument(help="A folder with one folder per class, or other data as for `infssm learn`."),
    ] = None,
    task: AfterTask = None,
    data_root: DataRoot = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Write the prediction for every sample to this CSV file.")
    ] = None,
    as_json: AsJson = False,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Test a learner on data with known classes, or a run again on all tasks it has seen.

    Examples:

    - `infssm eval my-learner photos/test` — accuracy of each class, and what was called unknown

    - `infssm eval runs/digits-5/ewc/vim_nano/seed0-3f2a90c1 --task 2`

    - `infssm eval RUN --predictions predictions.csv` — one line per sample: its class and the predicted one
    """
    from infssm._files import write_text
    from infssm.learner.evaluate import Prediction, evaluate_run
    from infssm.learner.scoring import Bits, Errors
    from infssm.learner.store.directory import RunDirectory
    from infssm.learner.store.versions import Versions

    if data is not None:
        if task is not None or data_root is not None or predictions is not None:
            raise ConfigError(
                "--task, --data-root and --predictions are for a run on its own tasks: leave them out, or leave out "
                "DATA; `infssm predict FOLDER DATA --json` lists what is predicted for each file"
            )
        _test(folder, data, as_json)
        return
    if task is None and Versions(folder).exists:
        raise ConfigError(
            f"{folder} is a learner, which keeps no data: name some to test it on, `infssm eval {folder} DATA`"
        )
    found: list[Prediction] | None = None if predictions is None else []
    rows = evaluate_run(folder, task, data_root=data_root, predictions=found)
    if predictions is not None and found is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([Prediction._fields, *(p._replace(probability=round(p.probability, 6)) for p in found)])
        write_text(predictions, text.getvalue())
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    for index, row in enumerate(rows):
        typer.echo(f"task {index}: {row}")
    mean = sum(row.value for row in rows) / len(rows)
    shown = f"AA {100 * mean:.2f} %"
    if isinstance(rows[0], Bits):
        shown = f"mean {mean:.3f} bits per {'byte' if rows[0].bytes else 'token'}"
    elif isinstance(rows[0], Errors):
        shown = f"mean RMSE {mean:.3f}"
    validation = RunDirectory(folder).config()["data"].get("evaluate") == "val"
    typer.echo(f"{shown}, on validation data" if validation else shown)
    if predictions is not None:
        typer.echo(f"wrote {predictions}")


def _test(folder: Path, data: str, as_json: bool) -> None:
    """Test a learner, or a run as it stands, on data of the user."""
    from infssm.learner.learner import Learner

    learner = Learner.load(folder)
    found = learner.evaluate(data)
    if found.bits is not None:
        typer.echo(json.dumps(asdict(found.bits)) if as_json else str(found.bits))
        return
    counts = found.confusion.counts
    samples = {label: int(n) for label, n in zip(learner.classes, counts.sum(1), strict=True) if n}
    if as_json:
        values = {"version": learner.version, **found._asdict(), "samples": samples}
        typer.echo(json.dumps({**values, "confusion": found.confusion.to_json()}))
        return
    typer.echo(
        f"{100 * found.accuracy:.2f} % of {sum(samples.values())} samples right, "
        f"{100 * found.unknown:.1f} % called unknown"
    )
    width = max(map(len, samples))
    for row, label in enumerate(learner.classes):
        if label not in samples:
            continue
        wrong = [(int(n), learner.classes[k]) for k, n in enumerate(counts[row]) if n and k != row]
        taken = ", ".join(f"{other} {n}" for n, other in sorted(wrong, reverse=True)[:3])
        share = f"{label:<{width}}  {100 * found.per_class[label]:6.2f} %   ({samples[label]} samples)"
        typer.echo(f"{share}   taken for {taken}" if taken else share)


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
