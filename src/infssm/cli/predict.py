"""``infssm predict``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infssm.cli.importing import Import
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from infssm.data import ImageFacts, SequenceFacts


def command(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a learner or a run.")],
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Images, wav files or series; or folders of them.")
    ],
    top: Annotated[int, typer.Option("--top", min=1, help="How many classes to show.")] = 3,
    task: Annotated[int | None, typer.Option("--task", help="The model as it was after this task (0-based).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per sample.")] = False,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Classify images, sounds or series with a learner or the model of a run.

    A learner also says where a sample is unlike all that it was taught ("unknown").

    A folder stands for all files in it and below that the model can read. A series is an .npy or .csv file [time,
    width]; an .npz holds many, as for training. A file that cannot be read is named on stderr, and the others are
    classified all the same; the exit code is then 3.

    Examples:

    - `infssm predict my-learner cat.jpg`

    - `infssm predict runs/digits-5/seq/vim_nano/seed0-1a2b3c4d seven.png`

    - `infssm predict RUN photos --top 1 --json > classes.jsonl`
    """
    from infssm.learner.learner import load

    model, bad = load(run, task=task), 0
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


def _samples(facts: ImageFacts | SequenceFacts, paths: list[Path]) -> Iterator[tuple[str, Any]]:
    """Names and samples, file by file; in the place of a sample the error that names its file."""
    from infssm.data import ImageFacts, audio, images
    from infssm.learner.reading import read_series

    series = not isinstance(facts, ImageFacts) and facts.rate is None
    endings = images.SUFFIXES if isinstance(facts, ImageFacts) else audio.SUFFIXES
    if series:
        endings = frozenset({".npy", ".npz", ".csv"})
    for path in paths:
        if not path.exists():
            yield str(path), DataError(f"there is no file or folder {path}")
            continue
        files = [path]
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix.lower() in endings and f.is_file())
            if not files:
                raise ConfigError(f"{path} holds no file that the model can read ({', '.join(sorted(endings))})")
        for file in files:
            if not series:
                yield str(file), file
                continue
            try:
                yield from read_series(file).items()
            except DataError as error:
                yield str(file), error
