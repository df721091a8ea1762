"""``infssm compress``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infssm.errors import ConfigError, DataError

_BATCH = 32


def command(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a run.")],
    data: Annotated[Path, typer.Argument(help="A folder of samples (images, sounds or series); no labels are needed.")],
    out: Annotated[Path, typer.Option(help="Folder to write the small model to.")],
    states: Annotated[int | None, typer.Option(help="States per layer to keep.")] = None,
    share: Annotated[float | None, typer.Option(help="Share of the states to keep, instead of --states.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps towards the large model.")] = 100,
    samples: Annotated[int, typer.Option(help="Most files of DATA to use.")] = 1024,
) -> None:
    """Write a model with fewer states per layer, trained to do what the model of a run does.

    Examples:

    - `infssm compress RUN photos/ --states 8 --out small` — then `infssm.models.from_pretrained("small")`
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
