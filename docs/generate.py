"""Rewrite the generated tables of README and docs from the registries: ``python docs/generate.py`` (``--check``).

mkdocs takes it as a hook, which fills in the API reference whenever the documentation is built.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

import infssm
from infssm.bench.presets import list_benchmarks
from infssm.bench.studies import list_studies
from infssm.cli.app import app
from infssm.data import list_datasets
from infssm.learner.config.fields import DataConfig, LogConfig, MethodConfig, ModelConfig, RunConfig, TrainConfig
from infssm.methods import explain_method
from infssm.models import list_models
from infssm.ssm import describe_probe, list_probes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def methods() -> str:
    """Every registered method with what it does and where it comes from."""
    rows = []
    for text in map(explain_method, infssm.list_methods()):
        paper = re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text.paper)
        rows.append(f"| `{text.name}` | {text.role} | {text.summary} | {paper or 'baseline'} |")
    return "\n".join(["| method | role | what it does | paper |", "|---|---|---|---|", *rows])


def works() -> str:
    """What works, from the registries."""
    rows = {
        "methods": infssm.list_methods(),
        "distances": infssm.list_distances(),
        "models": list_models(),
        "data sets": [*list_datasets(), "a folder per class", ".npz"],
        "benchmarks": list_benchmarks(),
        "studies": list_studies(),
    }
    lines = [f"| {what} ({len(names)}) | {', '.join(names)} |" for what, names in rows.items()]
    return "\n".join(["| what | names |", "|---|---|", *lines])


def probes() -> str:
    """Every layer of other libraries that states can be recorded from, or why not."""
    rows = []
    for name, probe in list_probes().items():
        library, _, layer = name.rpartition(".")
        states = describe_probe(name)
        if probe.refusal is None:
            states = states.rpartition(" (")[0]
        exact = "refused" if probe.refusal else "yes" if probe.exact else "mean over channels"
        rows.append(f"| `{layer}` | `{library}` | {_cell(states.removeprefix('refused: '))} | {exact} |")
    return "\n".join(["| layer | module | states | exact |", "|---|---|---|---|", *rows])


PACKAGES = (
    *("methods", "methods.replay", "models", "ssm", "ops", "data", "learner", "learner.metrics", "learner.store"),
    *("bench", "bench.presets", "bench.executors", "bench.sweeps", "bench.reports"),
)
ADAPTERS = {
    "learner.hub": ["HubClassifier", "HubLearner"],
    "integrations": ["mend_torchvision"],
    "integrations.transformers": ["accelerate", "accelerated", "restore", "ContinualTrainerMixin"],
    "integrations.timm": ["register"],
    "integrations.sklearn": ["ContinualClassifier"],
    "integrations.serve": ["create_app", "Limits"],
    "bench.studies": ["list_studies", "run_study", "Study"],
}


def api() -> str:
    """Every public name, for mkdocstrings: those of ``infssm`` first, then what its packages offer besides."""
    lines = ["## infssm", "", *(f"::: infssm.{name}" for name in infssm.__all__)]
    for package in PACKAGES:
        module = importlib.import_module(f"infssm.{package}")
        names = [n for n in module.__all__ if n not in infssm.__all__ and not inspect.ismodule(getattr(module, n))]
        documented = [n for n in names if callable(getattr(module, n)) and getattr(module, n).__doc__]
        lines += ["", f"## infssm.{package}", "", *(f"::: infssm.{package}.{name}" for name in documented)]
    for module_name, names in ADAPTERS.items():
        lines += ["", f"## infssm.{module_name}", "", *(f"::: infssm.{module_name}.{name}" for name in names)]
    made_on_use = {"lightning": "ContinualCallback(method, task=0)", "avalanche": "MethodPlugin(method)"}
    for library, signature in made_on_use.items():
        lines += [
            "",
            f"## infssm.integrations.{library}",
            "",
            f"`{signature}`: see [In another trainer](../guide/plug-in.md#in-another-trainer).",
        ]
    return "\n".join(lines)


def settings() -> str:
    """Every setting of a configuration, section by section, from the schema that checks it."""
    lines = []
    for section, (model, prefix) in {
        "Data": (DataConfig, "data."),
        "Model": (ModelConfig, "model."),
        "Method": (MethodConfig, "method."),
        "Training": (TrainConfig, "train."),
        "Loggers": (LogConfig, "log."),
        "The run": (RunConfig, ""),
    }.items():
        rows = []
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                continue
            value = field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else f"`{json.dumps(value)}`"
            rows.append(f"| `{prefix}{name}` | {default} | {_cell(field.description or '')} |")
        lines += [f"## {section}", "", "| setting | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def commands() -> str:
    """Every command with its arguments and options, from the application itself."""
    lines = []
    for name, command in _commands(typer.main.get_command(app), "infssm"):
        rows = []
        for parameter in command.params:
            if parameter.name in ("help", "install_completion", "show_completion"):
                continue
            named = ", ".join(f"`{option}`" for option in parameter.opts)
            shown = (
                named
                if parameter.param_type_name == "option"
                else f"`{parameter.metavar or str(parameter.name).upper()}`"
            )
            default = parameter.default
            plain = isinstance(default, (str, int, float, Path)) and default is not False and default != ""
            rows.append(f"| {shown} | {_cell(parameter.help or '')}{f' Default: `{default}`.' if plain else ''} |")
        table = ["", "| argument or option | meaning |", "|---|---|", *rows] if rows else []
        lines += [f"## {name}", "", inspect.cleandoc(command.help or ""), *table, ""]
    return "\n".join(lines)


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for part, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {part}")
        else:
            yield f"{name} {part}", command


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


TABLES = {"methods": methods, "works": works, "probes": probes, "settings": settings, "commands": commands}


def fill(text: str) -> str:
    """Replace what stands between ``<!-- begin: x -->`` and ``<!-- end: x -->``."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if pattern.search(text):
            table = make()
            text = pattern.sub(lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text)
    return text


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the source of each page."""
    return markdown.replace("<!-- api -->", api()) if "<!-- api -->" in markdown else markdown


def on_page_content(html: str, **_: object) -> str:
    """Called by mkdocs with each rendered page: docstrings mark code as ``:class:`Name```, which is not Markdown."""
    return re.sub(r":(?:class|func|meth|mod|attr|data):<code>~?([^<]*)</code>", r"<code>\1</code>", html)


def main() -> int:
    """Rewrite all pages, or with ``--check`` name those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [page for page in PAGES if fill(page.read_text("utf-8")) != page.read_text("utf-8")]
    for page in stale:
        if check:
            sys.stderr.write(f"out of date: {page.relative_to(ROOT)}; run python docs/generate.py\n")
        else:
            page.write_text(fill(page.read_text("utf-8")), encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
