"""Presets: from ``imagenet-r/5-task/inf-ssm`` to the values of a run, with the source of each."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import yaml

from infssm._registry import suggest
from infssm.errors import ConfigError
from infssm.learner.config.load import merge
from infssm.methods import canonical_name, parse_name

VARIANTS = ("paper", "authors-code")
"""Where the paper and its released code differ: follow the text, or the code."""

_HERE = files("infssm.bench.presets")
_MAIN_JOB = "digits/5-task"


@dataclass(frozen=True)
class Preset:
    """One cell of a results table, ready to run.

    values: nested values for :func:`infssm.learner.load_config`. sources: the tables they come from. assumed: fields
    the paper does not give, with the reason for the value chosen. paper: the published row, where there is one
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
        shown = ", ".join(f"{m} {_number(self.paper[m])}" for m in ("AA", "AIA", "FM"))
        return f"{method}; paper, {self.paper['table']}: {shown}"


def _number(value: Mapping[str, Any]) -> str:
    return f"{value['mean']:.2f}" + (f" ± {value['std']:.2f}" if value.get("std") is not None else "")


@cache
def paper_numbers() -> dict[str, Any]:
    """Every number of the paper's tables."""
    numbers: dict[str, Any] = json.loads((_HERE / "paper.json").read_text("utf-8"))
    return numbers


def list_benchmarks() -> list[str]:
    """Names of all benchmarks, such as ``imagenet-r/5-task``."""
    return sorted(f"{d.name}/{f.name.removesuffix('.yaml')}" for d in _HERE.iterdir() if d.is_dir() for f in _yamls(d))


def list_presets() -> list[str]:
    """Names of all presets: each benchmark with each of its methods."""
    return [f"{bench}/{row}" for bench in list_benchmarks() for row in _benchmark(bench)["methods"]]


def load_preset(name: str, variant: str = "paper") -> Preset:
    """Return the preset ``benchmark/method``, with the divergences of paper and released code settled by ``variant``.

    A method without a row of its own runs with the benchmark's training block and its own default options.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"unknown variant {variant!r}{suggest(variant, VARIANTS)}")
    bench_name, _, row_name = name.rpartition("/")
    if bench_name not in list_benchmarks():
        raise ConfigError(f"unknown preset {name!r}{suggest(name, list_presets())}")
    bench = _benchmark(bench_name)
    if row_name not in bench["methods"]:
        row_name = canonical_name(row_name)
    row = _row(bench["methods"], row_name)
    values = merge(_set_up(bench), {"benchmark": bench_name})
    values = merge(values, {"method": {"name": row_name}})
    values = merge(values, {key: row[key] for key in ("model", "train", "method") if key in row})
    for overlay in (_variants()[variant], bench.get("variants", {}).get(variant, {})):
        values = merge(values, _for_method(overlay, values["method"]["name"]))
    values, hard = _hard_labels(values)
    return Preset(
        name=name,
        values=values,
        sources=tuple(bench.get("sources", ())) + tuple(row.get("sources", ())),
        assumed=bench.get("assumed", {}) | row.get("assumed", {}) | hard,
        paper=_published(row.get("result")),
    )


def main_job(
    changes: Mapping[str, Any] | None = None, name: str = _MAIN_JOB
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """What ``infssm run`` does without arguments: the set-up of ``digits/5-task``, and its methods side by side.

    The first method trains task 0 for all. With ``changes`` to the model, the data set or its images, which its
    weights to start from may not fit, the set-up begins from scratch. ``name``: another benchmark of ours.
    """
    bench = copy.deepcopy(_benchmark(name))
    methods = tuple({"name": name, **row.get("method", {})} for name, row in bench["methods"].items())
    data = (changes or {}).get("data", {})
    other = not isinstance(data, Mapping) or not {"name", "image_size", "options"}.isdisjoint(data)
    values = _set_up(bench, start=not other and "model" not in (changes or {}))
    return values if name == _MAIN_JOB else values | {"benchmark": name}, methods


def is_job(name: str) -> bool:
    """Whether a name is that of a benchmark whose methods run side by side: one of ours, not of the paper."""
    return name in list_benchmarks() and not _benchmark(name)["sources"]


def _set_up(bench: Mapping[str, Any], *, start: bool = True) -> dict[str, Any]:
    """Data, model and training of a benchmark, from its weights to ``start`` from, if it has such."""
    values = {key: bench[key] for key in ("data", "model", "train")}
    return merge(values, bench.get("start", {}) if start else {})


@cache
def _benchmark(name: str) -> dict[str, Any]:
    folder, _, file = name.partition("/")
    loaded: dict[str, Any] = yaml.safe_load((_HERE / folder / f"{file}.yaml").read_text("utf-8"))
    return loaded


@cache
def _variants() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((_HERE / "variants.yaml").read_text("utf-8"))
    return loaded


def _row(rows: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A method's row, laid over the row it is ``like``, if any."""
    if name not in rows:
        return {"assumed": {"method": "no published values on this benchmark; the method's defaults"}}
    row: dict[str, Any] = rows[name]
    if "like" not in row:
        return row
    like: dict[str, Any] = rows[row["like"]]
    settings = {key: merge(like.get(key, {}), row.get(key, {})) for key in ("model", "train", "method", "assumed")}
    return like | row | settings


def _hard_labels(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Without mixing and smoothing where the base trains on class labels; and, where that changes them, the reason."""
    train, hard = values["train"], {"mixing": "none", "label_smoothing": 0}
    soft = any(train.get(key, value) != value for key, value in hard.items())
    if parse_name(values["method"]["name"])[0].supports_soft_labels or not soft:
        return dict(values), {}
    return merge(values, {"train": hard}), {"train.mixing": "hard labels: this method trains on class labels"}


def _yamls(folder: Traversable) -> list[Traversable]:
    return [f for f in folder.iterdir() if f.name.endswith(".yaml")]


def _for_method(overlay: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Of an overlay's ``methods``, lay those that the named method is made of over its ``method`` section."""
    section = overlay.get("method", {})
    for component in parse_name(method).classes:
        section = merge(section, overlay.get("methods", {}).get(component.name, {}))
    return {key: value for key, value in overlay.items() if key != "methods"} | {"method": section}


def _published(key: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Look up a published result by table, data set, number of tasks and method."""
    if key is None:
        return None
    found = [r for r in paper_numbers()["results"] if all(r[k] == v for k, v in key.items())]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} published results match {dict(key)}")
    row: dict[str, Any] = found[0]
    return row
