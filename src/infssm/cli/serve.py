"""``infssm serve``."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from infssm.cli.importing import Import


def command(
    folder: Annotated[Path, typer.Argument(help="A learner's folder, or a run directory.")],
    host: Annotated[
        str, typer.Option(help="The address to listen on. Any but this machine's own needs the token that is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free one.")] = 7860,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name of this server, such as that of a reverse proxy.")
    ] = None,
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token on 127.0.0.1, too: for machines with several users.")
    ] = False,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Serve a learner as a web page and a JSON API: teach classes, classify samples, undo.

    Examples:

    - `infssm serve my-learner` — open the address that is printed

    - `infssm serve my-learner --host 0.0.0.0 --port 8000` — for other machines, with a token
    """
    import infssm
    from infssm._optional import require

    for name in ("fastapi", "uvicorn", "python_multipart"):
        require(name, install="pip install 'infssm[serve]'")
    from infssm.integrations.serve.guard import is_loopback
    from infssm.integrations.serve.running import serve

    learner = infssm.load(folder)
    key = None if is_loopback(host) and not token else secrets.token_urlsafe(24)
    serve(learner, host=host, port=port, allow=allow_host or (), token=key, say=typer.echo)
