"""The ``infssm`` command. One file per command or group of commands; all work is done in the packages below."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 bad usage, 3 data missing, 4 diverged, 130 interrupted after saving."""
    try:
        import rich as _rich  # noqa: F401
        import typer as _typer  # noqa: F401
    except ImportError as error:
        sys.exit(_fail(f"the command line needs {error.name}: pip install 'infssm[bench]'", 2))
    from infssm.cli.app import invoke

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "→" shows "?", and the run continues
    sys.exit(invoke(arguments))


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code
