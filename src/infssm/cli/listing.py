"""``infssm list`` and ``schema``."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import textwrap
from typing import Annotated, Any

import typer

from infssm._catalogue import Text, read_methods
from infssm._registry import shorten, suggest
from infssm.cli.options import AsJson, Import
from infssm.errors import ConfigError

_DESCRIBED = {
    "models": ("models", "model"),
    "distances": ("ssm", "distance"),
    "probes": ("ssm", "probe"),
    "studies": ("bench.studies", "study"),
}
"""Package, and what one of them is called."""
_KINDS = ("methods", "models", "datasets", "distances", "probes", "presets", "studies")


def list_names(
    what: Annotated[
        str,
        typer.Argument(help=f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}.", autocompletion=lambda: list(_KINDS)),
    ],
    name: Annotated[str | None, typer.Argument(help="One of them, to describe; for a method with its options.")] = None,
    as_json: AsJson = False,
    imports: Import = None,  # noqa: ARG001 - imported while it is parsed
) -> None:
    """List the names that a configuration can use.

    Examples:

    - `infssm list methods`

    - `infssm list methods ewc` — what it does, its paper, and its options with their defaults
    """
    if what not in _KINDS:
        raise ConfigError(f"cannot list {shorten(repr(what))}{suggest(what, _KINDS)}")
    entries = _entries(what)
    if name is not None:
        if name not in entries:
            raise ConfigError(f"no {shorten(repr(name))} among {what}{suggest(name, entries)}")
        entries = {name: entries[name]}
    if as_json:
        found: list[dict[str, Any]] = [{"name": entry, "summary": summary} for entry, summary in entries.items()]
        for entry in found if what == "methods" else ():
            from infssm.methods import explain_method

            text = explain_method(entry["name"])
            options = [{"name": key, "default": default, "meaning": meaning} for key, default, meaning in text.options]
            entry |= {"role": text.role, "details": text.details, "paper": text.paper, "options": options}
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif name is not None and what == "methods":
        _show_method(name)
    else:
        width = max(map(len, entries), default=0)
        for entry_name, summary in entries.items():
            typer.echo(_line(f"{entry_name:<{width}}", summary))


def _show_method(name: str) -> None:
    from infssm.methods import explain_method

    text = explain_method(name)
    typer.echo(f"{name}, a {text.role}\n\n{text.summary}")
    if text.details:
        typer.echo(text.details.replace("``", ""))
    typer.echo(f"\npaper: {text.paper or 'none; a baseline'}")
    typer.echo(f"\noptions, set by `infssm run method={name} method.OPTION=VALUE`:" if text.options else "\nno options")
    width = max((len(key) for key, _, _ in text.options), default=0)
    for key, default, meaning in text.options:
        typer.echo(_line(f"  {key:<{width}}", f"{meaning} (default {default})"))


def _line(head: str, text: str) -> str:
    """``head  text``: one line in a pipe; on a terminal, long texts are wrapped and indented."""
    line = f"{head}  {text}".rstrip()
    columns = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or len(line) <= columns or columns < 2 * len(head):
        return line
    return textwrap.fill(text, columns, initial_indent=f"{head}  ", subsequent_indent=" " * (len(head) + 2))


def _entries(what: str) -> dict[str, str]:
    """Names and summaries. Packages are imported only where they are listed: importing torch takes seconds."""
    if what == "methods":
        texts = None if "infssm.methods" in sys.modules else read_methods()  # imported already with --import
        if texts is None:
            from infssm.methods import explain_method, list_methods

            explained = map(explain_method, list_methods())
            texts = {text.name: Text(text.summary, text.details, text.paper) for text in explained}
        return {name: f"{text.summary} [{_citation(text.paper) or 'baseline'}]" for name, text in texts.items()}
    if what == "datasets":
        from infssm.data.dataset import DATASETS

        return {name: DATASETS[name].summary for name in DATASETS}
    if what == "presets":
        from infssm.bench.presets import list_presets, load_preset

        return {name: load_preset(name).summary for name in list_presets()}
    package, one = _DESCRIBED[what]
    module = importlib.import_module(f"infssm.{package}")
    return {name: getattr(module, f"describe_{one}")(name) for name in getattr(module, f"list_{what}")()}


def _citation(paper: str) -> str:
    """``Kirkpatrick et al. 2017``, ``Li and Hoiem 2016`` or ``Fisher 1936`` of a whole reference."""
    year = re.search(r"\b\d{4}\b", paper)
    authors = re.match(r"(?:after )?(\w+)(?:( et al\.|(?:, \w+)+ and \w+)|( and \w+))?,", paper)
    if not authors or not year:
        return paper
    return f"{authors[1]}{' et al.' if authors[2] else authors[3] or ''} {year[0]}"


def schema() -> None:
    """Print the JSON schema of a configuration file, for editors that check and complete YAML.

    Example: `infssm schema > infssm.schema.json`, and in the first line of a file
    `# yaml-language-server: $schema=infssm.schema.json`
    """
    from infssm.learner.config.fields import RunConfig
    from infssm.methods import list_methods
    from infssm.models import list_models

    schema = RunConfig.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    for section, names in (("ModelConfig", list_models()), ("MethodConfig", list_methods())):
        schema["$defs"][section]["properties"]["name"]["examples"] = names
    for name in ("DataConfig", "ModelConfig", "MethodConfig"):  # `method: ewc` is `method: {name: ewc}`
        schema["$defs"][name] = {"anyOf": [{"type": "string"}, schema["$defs"][name]]}
    typer.echo(json.dumps(schema, indent=2, ensure_ascii=False))
