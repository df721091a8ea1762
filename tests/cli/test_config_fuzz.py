"""Thousands of odd overrides of every field: each is a valid configuration or a ConfigError of one line."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from infssm.bench.running import run_path
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, to_yaml
from infssm.learner.setup import check_config
from infssm.methods import list_methods, method_options

MODEL_OPTIONS = ("depth", "embed_dim", "patch_size", "img_size", "in_chans", "num_classes", "d_state", "drop_path_rate")
VALUES = [
    "", "null", "~", "true", "no", "0", "-1", "1", "3", "-0.5", "1.5", "1e3", "1e400", "-1e400", "1e-400", ".nan",
    ".inf", "-.inf", "nan", "inf", "99999999999999999999", "9" * 5000, "0x7fffffffffffffff", "0o777", "1_000", "1:30",
    "text", "''", "' '", '"\\0"', "a\0b", "\0", '"\\ud800"', "\udcff", "ünïcödé", "\u65e5\u672c", "\U0001f642",
    "\u2028", "\x85", "\ufeff", "/etc/passwd", "/dev/null", "~nobody_at_all/x", "../..", "/", ".", "a" * 5000,
    "a/" * 3000,
    "C:\\x", "[]", "{}", "[1, 2]", "[[1]]", "{a: 1}", "{1: 2}", "{[1]: 2}", "{? {a: b} : c}", "&a [*a]", "&a {b: *a}",
    "*gone",
    "[&a x, *a]", "[" * 200, "{a: " * 60 + "1" + "}" * 60, "2001-01-01", "2001-13-45", "!!int x", "!!int ''",
    "!!float x", "!!bool x", "!!timestamp x", "!!binary '='", "!!binary aGk=", "!!set {a}",
    "!!python/object/apply:os.system [ls]",
    "!!str 5", "!x y", "a: b: c", "- 1", "---", "%", "@x", "`x", "\t", "'", '"', "#", "|", ">", "{", "]", "<<: 1", "=",
    "{<<: {a: 1}}", "{<<: *a}", "a=b", "digits", "seq", "vim_nano", "er+ewc", "+", "er++", "ewc+ewc", "joint+ewc",
    "none", "deit", "10" * 20,
    "[&a [x, x, x], " + ", ".join(f"&{b} [*{a}, *{a}, *{a}]" for a, b in pairwise("abcdefghijkl")) + "]",
]  # fmt: skip
VALUES += [f"{value}, {value}" for value in ("1", "x", "&a *a")]


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        yield prefix + name
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.")


@cache
def _paths() -> tuple[str, ...]:
    """Every field, options of models, data and every method, and some paths to nothing."""
    nothing = ("", ".", "..", "train.", ".train", "train..lr", "train.lr.x", "no", "ünï", "a" * 3000, "a." * 3000, "\0")
    options = [f"model.options.{name}" for name in (*MODEL_OPTIONS, "", "no_such")]
    options += [f"data.options.{name}" for name in ("size", "no_such")]
    return (*_fields(RunConfig), *options, *nothing, *(f"train.{name}" for name in nothing))


def _refusal(source: dict[str, Any] | Path, overrides: Sequence[str] = ()) -> str | None:
    """The message with which a configuration is refused; None for one that can be run."""
    try:
        config = load_config(source, overrides)
        check_config(config)
        run_path(config)
    except ConfigError as error:
        return str(error)
    assert load_config(yaml.safe_load(to_yaml(config))) == config
    return None


def _valid(*overrides: str) -> bool:
    message = _refusal({"model": {"name": "vim_nano", "options": {"depth": 1, "embed_dim": 8}}}, overrides)
    assert message is None or ("\n" not in message and len(message) < 2000), message
    return message is None


def test_every_field_with_many_values() -> None:
    cases = [f"{path}={value}" for path in _paths() for value in VALUES]
    chosen = random.Random(0).sample(cases, 4000)
    valid = sum(map(_valid, chosen))
    assert 100 < valid < 2000


@pytest.mark.parametrize("name", list_methods())
def test_every_option_of_every_method(name: str) -> None:
    draw = random.Random(name)
    options = [o for schema in method_options(name, {}).values() for o in type(schema).model_fields]
    for option in options:
        for value in draw.sample(VALUES, 30):
            _valid(f"method={name}", f"method.{option}={value}")


def test_brackets_deeper_than_the_reader_can_go() -> None:
    assert not _valid(f"model.options={'[' * 2000}")


def test_several_at_once() -> None:
    draw = random.Random(0)
    for _ in range(500):
        _valid(*(f"{draw.choice(_paths())}={draw.choice(VALUES)}" for _ in range(draw.randint(2, 5))))


def test_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text in VALUES:
        for content in (text, f"train: {text}", f"model:\n  options: {text}"):
            path.write_bytes(content.encode("utf-8", "surrogatepass"))
            assert "\n" not in (_refusal(path) or "")
