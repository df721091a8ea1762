"""``infssm serve``."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from infssm.cli.importing import Import
from infssm.errors import ConfigError


def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder of a learner or a run; else one for a new learner."),
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen on. Any but this machine's own needs the token that is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free one.")] = 7860,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Serve a learner as a web page and a JSON API: teach classes, classify samples, undo.

    Where FOLDER holds no learner, one for images is made there, on the weights `cifar100-base` that come with infssm;
    start with `infssm learn` for sounds, series or other weights.

    Examples:

    - `infssm serve my-learner` — open the address that is printed

    - `infssm serve my-learner --host 0.0.0.0 --port 8000` — for other machines, with a token
    """
    from infssm._optional import require

    for name in ("fastapi", "uvicorn", "python_multipart"):
        require(name, install="pip install 'infssm[serve]'")
    from infssm.integrations.serve.guard import is_loopback
    from infssm.integrations.serve.running import serve
    from infssm.learner.learner import Learner
    from infssm.learner.store.directory import RunDirectory
    from infssm.learner.store.versions import Versions

    there = Versions(folder).exists or RunDirectory(folder).is_run
    learner = Learner.load(folder) if there else Learner(weights="cifar100-base", folder=folder)
    if learner.modality == "language":
        raise ConfigError("a language model cannot be served: it is taught texts by `infssm learn`")
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    serve(learner, host=host, port=port, token=token, say=typer.echo)
