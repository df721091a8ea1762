"""Presets: from ``imagenet-r/5-task/inf-ssm`` to the values of a run, with the source of each."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from infssm._registry import suggest
from infssm.errors import ConfigError
from infssm.learner.config.load import merge
from infssm.methods import canonical_name, parse_name

VARIANTS = ("paper", "authors-code")
"""Where the paper and its released code differ: follow the text, or the code."""

_HERE = files("infssm.bench.presets")
MAIN_JOB = "digits/5-task"
"""The runs of ``infssm run`` without arguments."""


@dataclass(frozen=True)
class Preset:
    """One cell of a results table, ready to run.

    values: nested values for :func:`infssm.learner.load_config`. sources: the tables they come from. assumed: fields
    the paper does not give, with the reason for the value chosen. paper: the published row, if there is one
    (AA, AIA and FM in percent, each with mean and std).
    """

    name: str
    values: dict[str, Any]
    sources: tuple[str, ...]
    assumed: dict[str, str]
    paper: dict[str, Any] | None

    @property
    def summary(self) -> str:
        """One line: the method and the published AA, AIA and FM in percent."""
        method = self.values["method"]["name"]
        if self.paper is None:
            return f"{method}; no published result"
        shown = []
        for name in ("AA", "AIA", "FM"):
            mean, std = self.paper[name]["mean"], self.paper[name].get("std")
            shown.append(f"{name} {mean:.2f}" + ("" if std is None else f" ± {std:.2f}"))
        return f"{method}; paper, {self.paper['table']}: {', '.join(shown)}"


@cache
def paper_numbers() -> dict[str, Any]:
    """Every number of the paper's tables."""
    numbers: dict[str, Any] = json.loads((_HERE / "paper.json").read_text("utf-8"))
    return numbers


def list_benchmarks() -> list[str]:
    """Names of all benchmarks, such as ``imagenet-r/5-task``."""
    folders = [folder for folder in _HERE.iterdir() if folder.is_dir()]
    files_of = [(folder.name, file.name) for folder in folders for file in folder.iterdir()]
    return sorted(f"{folder}/{file.removesuffix('.yaml')}" for folder, file in files_of if file.endswith(".yaml"))


def list_presets() -> list[str]:
    """Names of all presets: each benchmark with each of its methods."""
    return [f"{bench}/{row}" for bench in list_benchmarks() for row in _read(bench)["methods"]]


def load_preset(name: str, variant: str = "paper") -> Preset:
    """Return the preset ``benchmark/method``, with the divergences of paper and released code settled by ``variant``.

    A method without a row of its own runs with the benchmark's training block and its own default options.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"unknown variant {variant!r}{suggest(variant, VARIANTS)}")
    bench_name, _, row_name = name.rpartition("/")
    if bench_name not in list_benchmarks():
        raise ConfigError(f"unknown preset {name!r}{suggest(name, list_presets())}")
    bench = _read(bench_name)
    if row_name not in bench["methods"]:
        row_name = canonical_name(row_name)
    row = _row(bench["methods"], row_name)
    values = merge(_set_up(bench), {"benchmark": bench_name, "method": {"name": row_name}})
    values = merge(values, {key: row[key] for key in ("model", "train", "method") if key in row})
    components = parse_name(values["method"]["name"])
    for overlay in (_read("variants")[variant], bench.get("variants", {}).get(variant, {})):
        section = overlay.get("method", {})
        for component in components.classes:
            section = merge(section, overlay.get("methods", {}).get(component.name, {}))
        values = merge(values, {k: v for k, v in overlay.items() if k != "methods"} | {"method": section})
    assumed = bench.get("assumed", {}) | row.get("assumed", {})
    hard = {"mixing": "none", "label_smoothing": 0}
    soft = any(values["train"].get(key, value) != value for key, value in hard.items())
    if soft and not components[0].supports_soft_labels:
        values = merge(values, {"train": hard})
        assumed = assumed | {"train.mixing": "hard labels: this method trains on class labels"}
    sources = (*bench.get("sources", ()), *row.get("sources", ()))
    paper = None
    if (key := row.get("result")) is not None:  # table, data set, number of tasks and method of a published result
        matches = [r for r in paper_numbers()["results"] if all(r[k] == v for k, v in key.items())]
        if len(matches) != 1:
            raise ConfigError(f"{len(matches)} published results match {dict(key)}")
        paper = matches[0]
    return Preset(name, values, sources, assumed, paper)


def main_job(
    changes: Mapping[str, Any] | None = None, name: str = MAIN_JOB
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """The runs of ``infssm run`` without arguments: the set-up of ``digits/5-task``, and its methods side by side.

    The first method trains task 0 for all. With ``changes`` to the model, the data set or its images, which its
    weights to start from may not fit, the set-up begins from scratch. ``name``: another benchmark of ours.
    """
    bench = copy.deepcopy(_read(name))
    methods = tuple({"name": name, **row.get("method", {})} for name, row in bench["methods"].items())
    data = (changes or {}).get("data", {})
    other = not isinstance(data, Mapping) or not {"name", "image_size", "options"}.isdisjoint(data)
    values = _set_up(bench, start=not other and "model" not in (changes or {}))
    return values if name == MAIN_JOB else values | {"benchmark": name}, methods


def is_job(name: str) -> bool:
    """Whether a name is that of a benchmark whose methods run side by side: one of ours, not of the paper."""
    return name in list_benchmarks() and not _read(name)["sources"]


def _set_up(bench: Mapping[str, Any], *, start: bool = True) -> dict[str, Any]:
    """Data, model and training of a benchmark, from its weights to ``start`` from, if it has such."""
    values = {key: bench[key] for key in ("data", "model", "train")}
    return merge(values, bench.get("start", {}) if start else {})


@cache
def _read(name: str) -> dict[str, Any]:
    """A YAML file of this package: a benchmark, or the variants."""
    loaded: dict[str, Any] = yaml.safe_load(_HERE.joinpath(*f"{name}.yaml".split("/")).read_text("utf-8"))
    return loaded


def _row(rows: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A method's row, merged over the row that it names as ``like``, if any."""
    if name not in rows:
        return {"assumed": {"method": "no published values on this benchmark; the method's defaults"}}
    row: dict[str, Any] = rows[name]
    if "like" not in row:
        return row
    like: dict[str, Any] = rows[row["like"]]
    settings = {key: merge(like.get(key, {}), row.get(key, {})) for key in ("model", "train", "method", "assumed")}
    return like | row | settings
