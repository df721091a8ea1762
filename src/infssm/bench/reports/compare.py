"""Runs side by side: grouped into set-ups, each summarized over its seeds."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infssm.bench.reports.rows import PairedTest, Row, verdict
from infssm.errors import ConfigError
from infssm.learner.config.load import counting
from infssm.learner.metrics import summarize
from infssm.learner.store.directory import RunDirectory

_NOT_COMPARED = ("seed", "method.name", "train.task0")
"""Settings that do not make another set-up: seeds are averaged over, the method has a column of its own, and where the
model of task 0 came from is not a property of the method."""

_PROTOCOL = ("data.", "model.", "train.epochs", "train.task0_epochs", "train.limit_batches")
"""Settings that define the benchmark. Runs that differ in one of them are never ranked against each other."""


@dataclass(frozen=True)
class Comparison:
    """Rows of all set-ups, grouped by benchmark.

    Benchmarks and methods are in the order in which the runs were given; set-ups of one method are in increasing order
    of their settings. ``left_out`` names the runs that are not counted, with the reason.
    """

    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    paired: tuple[PairedTest, ...] = ()

    @property
    def benchmarks(self) -> dict[str, list[Row]]:
        """Rows of each benchmark, by its name."""
        tables: dict[str, list[Row]] = {}
        for row in self.rows:
            tables.setdefault(row.benchmark, []).append(row)
        return tables

    @property
    def verdicts(self) -> dict[str, str]:
        """The result of each benchmark in one sentence; benchmarks with nothing to compare are left out."""
        return {name: sentence for name, rows in self.benchmarks.items() if (sentence := verdict(rows))}

    def sentences(self, benchmark: str) -> list[str]:
        """The verdict on a benchmark and the paired tests on it."""
        tests = [test.sentence() for test in self.paired if test.benchmark == benchmark]
        return [*filter(None, [verdict(self.benchmarks[benchmark])]), *tests]

    def verdict(self) -> str:
        """All verdicts, one line per benchmark; the benchmark is named where there are several."""
        if len(self.benchmarks) == 1:
            return "".join(self.verdicts.values())
        return "\n".join(f"{benchmark}: {sentence}" for benchmark, sentence in self.verdicts.items())


@dataclass(frozen=True)
class _Setup:
    """The key that runs of one row share: everything that decides a result, except the seed.

    ``settings`` are by dotted names.
    """

    title: str
    method: str
    settings: dict[str, Any]

    @property
    def protocol(self) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name.startswith(_PROTOCOL)}

    def shown(self, names: Collection[str]) -> str:
        """``" (weight=1.0, train.lr=0.001)"``: those of the named settings that this set-up has."""
        parts = [f"{name.removeprefix('method.')}={v}" for name, v in self.settings.items() if name in names]
        return f" ({', '.join(parts)})" if parts else ""


def compare(runs: Sequence[RunDirectory]) -> Comparison:
    """Group complete runs by everything but their seed, and summarize each group.

    Runs on data with different contents are kept apart, even where all their settings agree. Each seed of a set-up is
    counted once: a further run with it is left out and named in ``Comparison.left_out``.
    """
    if not runs:
        raise ConfigError("there are no complete runs to compare")
    groups: dict[str, tuple[_Setup, dict[int, RunDirectory]]] = {}
    repeated = []
    for run in runs:
        config = run.config()
        setup = _setup(run, config)
        key = json.dumps([setup.title, setup.method, sorted(setup.settings.items())], default=str)
        _, members = groups.setdefault(key, (setup, {}))
        if members.setdefault(config["seed"], run) is not run:
            repeated.append(_repetition(config, members[config["seed"]], run))
    setups = [setup for setup, _ in groups.values()]
    named = {title: _varying([s.protocol for s in setups if s.title == title]) for title in {s.title for s in setups}}
    benchmarks = [setup.title + setup.shown(named[setup.title]) for setup in setups]
    rows: list[tuple[Any, Row]] = []
    for (setup, members), benchmark in zip(groups.values(), benchmarks, strict=True):
        rivals = [other for other, name in zip(setups, benchmarks, strict=True) if name == benchmark]
        methods = list(dict.fromkeys(other.method for other in rivals))
        varying = {m: _varying([other.settings for other in rivals if other.method == m]) for m in methods}
        # Training settings that were varied for one method are shown for all of them: else a reader could not tell
        # which learning rate the others had.
        trained = {name for names in varying.values() for name in names if name.startswith("train.")}
        label = setup.method + setup.shown({*varying[setup.method], *trained})
        order = [_sorted_as(setup.settings.get(name)) for name in varying[setup.method]]
        place = (benchmarks.index(benchmark), methods.index(setup.method), order)
        seeds = sorted(members)
        matrices = tuple(members[seed].matrix() for seed in seeds)
        distinct = {tuple(run.names_per_task()) for run in members.values()}
        classes = distinct.pop() if len(distinct) == 1 else ()
        row = Row(benchmark, setup.method, label, tuple(seeds), summarize(matrices), matrices, classes)
        rows.append((place, row))
    return Comparison(tuple(row for _, row in sorted(rows, key=lambda item: item[0])), tuple(repeated))


def _setup(run: RunDirectory, config: dict[str, Any]) -> _Setup:
    data, model = config["data"], config["model"]
    title = f"{data['name']}, {data['num_tasks']} tasks, {model['name']}"
    if data.get("evaluate") == "val":
        title += ", on validation data"
    settings = {name: value for name, value in counting(config).items() if name not in _NOT_COMPARED}
    # A digest of the data's contents is stored with the split; it is left out if the split cannot be read.
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        settings["data.fingerprint"] = str(json.loads(run.split_path.read_bytes())["fingerprint"])[:8]
    return _Setup(title, config["method"]["name"], settings)


def _varying(settings: list[dict[str, Any]]) -> list[str]:
    """Names of the settings that differ between set-ups."""
    names = dict.fromkeys(name for values in settings for name in values)
    return [name for name in names if len({str(values.get(name)) for values in settings}) > 1]


def _sorted_as(value: Any) -> tuple[int, float, str]:
    """Sorting key of a setting's value: numbers by size, before text."""
    try:
        return 0, float(value), ""
    except (TypeError, ValueError):
        return 1, 0.0, str(value)


def _repetition(config: dict[str, Any], counted: RunDirectory, run: RunDirectory) -> str:
    first, second = (c["train"].get("task0") for c in (counted.config(), config))
    why = "has the same settings" if first == second else f"differs only in train.task0 ({first}, here {second})"
    return (
        f"left out {run.path}: seed {config['seed']} of {config['method']['name']} is counted already, by "
        f"{counted.path}, which {why}"
    )
