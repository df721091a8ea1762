"""``infssm learn``, ``forget``, ``undo``, ``show`` and ``serve``."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infssm.cli.options import AsJson, Import
from infssm.errors import ConfigError

if TYPE_CHECKING:
    from infssm.learner.learner import Learner


Folder = Annotated[Path, typer.Argument(metavar="LEARNER", help="The folder of a learner or a run.")]


def learn(
    folder: Annotated[Path, typer.Argument(metavar="LEARNER", help="Its folder; created by the first lesson.")],
    data: Annotated[
        str, typer.Argument(help="A folder with one folder per class, an .npz, `text:FOLDER`, `hf:NAME` or a data set.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SETTING=VALUE]...", help="Settings of a new learner.")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="The class of all samples if DATA is a flat folder of files.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the lesson; the folder's by default.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Teach a learner new classes, more samples of known ones, or both.

    The old data are not needed. By default the backbone is frozen and a head of class statistics learns, which forgets
    nothing. For images the backbone has weights that come with infssm, for sounds and series the first lesson trains
    it; `model=`, `model.weights=` and `method=` choose others. A run of `infssm run` can be taught more in the same
    way. If a lesson fails, the previous version stays.

    Examples:

    - `infssm learn my-learner photos/monday`

    - `infssm learn my-learner photos/new-cats --label cat`

    - `infssm learn my-learner photos/monday model.weights=cifar100-base`

    - `infssm learn runs/digits-5/er/vim_nano/seed0-1a2b3c4d more-digits`

    - `infssm learn my-lm text:manuals/french`
    """
    from infssm.learner.config.load import load_config, merge, parse_overrides, to_dict
    from infssm.learner.events import choose_screen
    from infssm.learner.learner import Learner, is_stored

    if is_stored(folder):
        learner = Learner.load(folder)
        for setting in overrides or ():  # the same command may be given every day
            if load_config(merge(to_dict(learner.config), parse_overrides([setting]))) != learner.config:
                raise ConfigError(f"{folder} has other settings already: leave {setting} out")
    else:
        learner = Learner(folder=folder, settings=parse_overrides(overrides or ()))
    samples: Any = data
    if label is not None:
        samples = sorted(path for path in Path(data).rglob("*") if path.is_file() and not path.name.startswith("."))
    title = name or (Path(data).name if label else None)
    lesson = learner.learn(samples, label, name=title, listen=choose_screen(quiet).open())
    if quiet:
        return
    total = sum(lesson.samples.values())
    score = "" if lesson.score is None else f"; {_score(learner, lesson.score)} on samples held out"
    typer.echo(
        f"learnt {lesson.name}: {total} samples of {_few(list(lesson.samples))} in {lesson.seconds:.1f} s{score}"
    )
    typer.echo(f"{folder} {_known(learner)} (version {learner.version})")


def forget(
    folder: Folder,
    classes: Annotated[list[str], typer.Argument(metavar="CLASS", help="Names of the classes.")],
    keep_versions: Annotated[
        bool, typer.Option("--keep-versions", help="Keep older versions, which still know the classes.")
    ] = False,
) -> None:
    """Remove classes from a learner and from everything it stores, including older versions.

    Examples:

    - `infssm forget my-learner cat`
    """
    from infssm.learner.learner import Learner

    learner = Learner.load(folder)
    remains = learner.forget(*classes, keep_versions=keep_versions)
    typer.echo(f"forgot {_few(classes)}: {remains}")
    typer.echo(f"{folder} {_known(learner)} (version {learner.version})")


def undo(folder: Folder) -> None:
    """Restore the version of a learner before its last change.

    Examples:

    - `infssm undo my-learner`
    """
    from infssm.learner.learner import Learner

    learner = Learner.load(folder)
    learner.undo()
    typer.echo(f"{folder} {_known(learner)} again (version {learner.version})")


def show(
    folder: Folder,
    as_json: AsJson = False,
) -> None:
    """Show what a learner knows: its classes and its history of lessons.

    Examples:

    - `infssm show my-learner`
    """
    from infssm.learner.learner import Learner

    learner = Learner.load(folder)
    if as_json:
        values = {
            "version": learner.version,
            "modality": learner.modality,
            "method": learner.config.method.name,
            "model": learner.config.model.name,
            "classes": list(learner.classes),
            "history": [asdict(lesson) for lesson in learner.history],
        }
        typer.echo(json.dumps(values))
        return
    typer.echo(f"{folder}: {learner.config.method.name} on {learner.config.model.name}, version {learner.version}")
    typer.echo(f"{_known(learner)}: {', '.join(learner.classes)}")
    for lesson in learner.history:
        score = "" if lesson.score is None else f", {_score(learner, lesson.score)} on samples held out"
        counts = ", ".join(f"{label} ({n})" if n else label for label, n in lesson.samples.items())
        when = lesson.time.replace("T", " ").replace("+00:00", " UTC") or "-"
        typer.echo(f"  {when}  {lesson.name}: {counts}{score}")


def _known(learner: Learner) -> str:
    one, many = ("class", "classes") if learner.has_classes else ("domain", "domains")
    count = len(learner.classes)
    return f"knows {count} {one if count == 1 else many}"


def _score(learner: Learner, value: float) -> str:
    return f"{100 * value:.1f} % right" if learner.has_classes else f"{value:.3f} bits"


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def serve(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder of a learner or a run, or of a new learner."),
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen on. All but this machine's own needs the token that is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free one.")] = 7860,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """Serve a learner as a web page and a JSON API: teach classes, classify samples, undo.

    If FOLDER holds no learner, one for images is created there, on the weights `cifar100-base` that come with infssm;
    start with `infssm learn` for sounds, series or other weights.

    Examples:

    - `infssm serve my-learner` — open the address that is printed

    - `infssm serve my-learner --host 0.0.0.0 --port 8000` — for other machines, with a token
    """
    from infssm._optional import require

    for name in ("fastapi", "uvicorn", "python_multipart"):
        require(name, install="pip install 'infssm[serve]'")
    from infssm.integrations.serve.app import run_server
    from infssm.integrations.serve.guard import is_loopback
    from infssm.learner.learner import Learner, is_stored

    learner = Learner.load(folder) if is_stored(folder) else Learner(weights="cifar100-base", folder=folder)
    if not learner.has_classes:
        raise ConfigError("a language model cannot be served: it is taught texts by `infssm learn`")
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    run_server(learner, host=host, port=port, token=token, say=typer.echo)
