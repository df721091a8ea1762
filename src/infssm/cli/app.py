"""The typer application and its exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from infssm._registry import shorten
from infssm.cli import learn, listing, machine, predict, report, run
from infssm.errors import InfssmError

app = typer.Typer(
    name="infssm",
    help="Teach state space models new classes at any time with less forgetting, and measure methods that do.",
    epilog="Start with `infssm run`: five methods on five tasks of digits, a table and a report in a few minutes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "run": run.run,
    "learn": learn.learn,
    "forget": learn.forget,
    "undo": learn.undo,
    "show": learn.show,
    "sweep": run.sweep,
    "resume": run.resume,
    "eval": predict.evaluate,
    "export": predict.export,
    "compress": predict.compress,
    "predict": predict.predict,
    "serve": learn.serve,
    "report": report.report,
    "study": report.study,
    "list": listing.list_names,
    "schema": listing.schema,
    "doctor": machine.doctor,
    "bench": machine.bench,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(machine.data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        from infssm import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run the application; return its exit code; errors go to stderr."""
    formatwarning, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        app(args=repeat_seeds(sys.argv[1:] if arguments is None else arguments), prog_name="infssm")
    except SystemExit as leaving:
        return 130 if _was_interrupted(leaving) else int(leaving.code or 0)
    except InfssmError as error:
        _tell(str(error))
        return error.exit_code
    except OSError as error:  # a name too long, a disk full, a folder read-only: the system's word, not a traceback
        if error.errno is None:
            raise
        _tell(f"{shorten(str(error.filename), 200)}: {error.strerror}" if error.filename else str(error.strerror))
        return 2
    finally:
        warnings.formatwarning = formatwarning
    return 0


def _tell(message: str) -> None:
    Console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {message}"), highlight=False, soft_wrap=True)


def _format_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> str:
    """A warning as one line, without the place in the source it came from."""
    return f"warning: {message}\n" if category is UserWarning else f"{category.__name__}: {message}\n"


def repeat_seeds(arguments: Sequence[str]) -> list[str]:
    """``--seed 0 10 100`` as ``--seed 0 --seed 10 --seed 100``: an option takes one value where it is parsed.

    Only numbers right after ``--seed N`` are seeds.
    """
    spread: list[str] = []
    for argument in arguments:
        after_seed = len(spread) > 1 and spread[-2] == "--seed" and spread[-1].isdigit()
        spread += ["--seed", argument] if after_seed and argument.isdigit() else [argument]
    return spread


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt is behind an exit; the framework turns it into exit code 1."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _was_interrupted(error.__context__))
