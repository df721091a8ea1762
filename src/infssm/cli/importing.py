"""``--import``, an option of every command that builds models, methods or data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _import(paths: list[Path] | None) -> list[Path] | None:
    if paths:
        from infssm._user_code import import_files

        import_files(paths)
    return paths


Import = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        callback=_import,
        is_eager=True,
        help="A Python file of yours that registers methods, models, data sets or distances.",
    ),
]
