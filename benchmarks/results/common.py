"""Shared by the pages on small streams: the runs of a stream, the search for weights, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.pages import markdown_table, paired_gain, remembered, spread
from benchmarks.presets import SEEDS
from infssm.bench.executors import Experiment, LocalProcesses, gather, results
from infssm.bench.running import run_path
from infssm.bench.studies.study import TrainedRun, _fabric
from infssm.learner.config.load import load_config, merge
from infssm.learner.evaluate import evaluate
from infssm.learner.saving import load_newest
from infssm.learner.setup import load_weights

TRAIN_TASK0 = ("lucir", "clfd", "joint", "si", "ucl")
"""Methods whose heads, encoders or measurements must be there from task 0 on."""

Run = tuple[str, dict[str, Any], int]
"""Method name, its options, seed."""


K = TypeVar("K")


class Outcome(NamedTuple):
    """What one run gave, in percent.

    ``ti`` is task-incremental AA; ``new`` and ``new_ti`` the mean accuracy on each later task right after it was
    learned, class- and task-incremental; ``val`` AA on validation images; ``weight`` what ``auto`` chose.
    """

    aa: float
    aia: float
    fm: float
    ti: float
    new: float
    new_ti: float
    val: float
    seconds: float
    weight: float | None


class Bench:
    """Runs of one stream, each from the task-0 model that seq trained with the same seed."""

    def __init__(self, name: str, base: Mapping[str, Any], out: Path, workers: int) -> None:
        self.name, self.base, self.out, self.workers = name, base, out, workers

    def trained(self, train: Mapping[str, Any]) -> Bench:
        """The same stream with other settings of training."""
        return Bench(self.name, merge(self.base, {"train": train}), self.out, self.workers)

    def config(self, run: Run) -> Any:
        method, options, seed = run
        common = {"seed": seed, "out": str(self.out), "train": {"threads": 1}}
        first = load_config(merge(merge(self.base, common), {"method": "seq"}))
        if method == "seq" and not options:
            return first
        values = merge(merge(self.base, common), {"method": {"name": method, **options}})
        start = str(run_path(first) / "checkpoints" / "task_00.safetensors")
        if method.startswith("l2p-r"):  # its queries need a trained model
            values = merge(values, {"model": {"weights": start}})
        elif method.split("+")[0] not in TRAIN_TASK0:
            values = merge(values, {"train": {"task0": start}})
        return load_config(values)

    def go(self, runs: Iterable[Run]) -> list[Outcome]:
        """Carry all out, ``workers`` at once; outcomes in order."""
        torch.set_num_threads(1)
        runs = list(runs)
        self._carry_out([("seq", {}, seed) for seed in {seed for *_, seed in runs}])  # their task 0 serves the others
        results = self._carry_out(runs)
        return [self._outcome(run, result) for run, result in zip(runs, results, strict=True)]

    def every_seed(self, methods: Mapping[K, tuple[str, dict[str, Any]]]) -> dict[K, list[Outcome]]:
        """Outcomes of each method with its options, by seed."""
        found = self.go((name, options, seed) for name, options in methods.values() for seed in SEEDS)
        return {label: found[len(SEEDS) * i :][: len(SEEDS)] for i, label in enumerate(methods)}

    def _carry_out(self, runs: Sequence[Run]) -> list[Any]:
        configs = [self.config(run) for run in runs]
        jobs = {run_path(config): Experiment.of(config) for config in configs}
        found = dict(zip(jobs, results(gather(LocalProcesses(self.workers), jobs.values(), quiet=True)), strict=True))
        return [found[run_path(config)] for config in configs]

    @staticmethod
    def _outcome(run: Run, result: Any) -> Outcome:
        """What a run gave, tested on validation images too; remembered in its directory."""

        def measure() -> Outcome:
            views = (result.matrix.class_incremental, result.matrix.task_incremental)
            outcome = Outcome(
                *(100 * v for v in (result.aa, result.aia, result.fm, result.matrix.task_incremental.aa)),
                *(100 * float(m.values.diagonal()[1:].mean()) for m in views),
                100 * _validation_aa(result.path),
                result.seconds,
                _auto_weight(result.path),
            )
            print(f"{run[0]} {run[1]} seed {run[2]}: AA {outcome.aa:.1f} val {outcome.val:.1f}", flush=True)
            return outcome

        return Outcome(*remembered(result.path / "outcome.json", measure))


def _validation_aa(path: Path) -> float:
    run = TrainedRun.open(path)
    load_weights(run.setup.method, path / "checkpoints" / f"task_{run.tasks - 1:02}.safetensors")
    stream = run.setup.stream
    seen = stream[run.tasks - 1].classes.stop
    values = [evaluate(_fabric(), run.setup, stream[t], seen=seen, part="val") for t in range(run.tasks)]
    return sum(v.class_incremental for v in values) / len(values)


def _auto_weight(path: Path) -> float | None:
    state, _ = load_newest(path / "checkpoints" / "last.ckpt")
    components = state["method"]["components"]
    weights = [c["weight"] for c in components.values() if isinstance(c, dict) and "weight" in c]
    return weights[0] if weights else None


Candidate = tuple[str, dict[str, Any], str, float]
"""Method name, fixed options, name of the weight, scale of its grid (1 for all but UCL's β)."""

COARSE = (1e0, 1e2, 1e4, 1e6, 1e8)


class Found(NamedTuple):
    """The weight with the best mean validation AA, and the outcomes of every weight tried, by seed."""

    weight: float
    grid: dict[float, list[Outcome]]


def search(bench: Bench, candidates: Mapping[str, Candidate]) -> dict[str, Found]:
    """The same search for all: five weights two decades apart, then both neighbours of the best by a decade."""
    grids: dict[str, dict[float, list[Outcome]]] = {label: {} for label in candidates}

    def measure(wanted: Mapping[str, Sequence[float]]) -> None:
        runs = {}
        for label, weights in wanted.items():
            method, options, key, _ = candidates[label]
            runs |= {(label, weight): (method, {**options, key: weight}) for weight in weights}
        for (label, weight), found in bench.every_seed(runs).items():
            grids[label][weight] = found

    def best(label: str) -> float:
        grid = grids[label]
        return max(grid, key=lambda weight: statistics.mean(outcome.val for outcome in grid[weight]))

    measure({label: [scale * weight for weight in COARSE] for label, (*_, scale) in candidates.items()})
    measure({label: [best(label) / 10, best(label) * 10] for label in candidates})
    return {label: Found(best(label), dict(sorted(grid.items()))) for label, grid in grids.items()}


COLUMNS = {"AA": "aa", "AIA": "aia", "FM": "fm", "task-inc. AA": "ti", "new task": "new", "new, task-inc.": "new_ti"}


def outcomes(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Outcome]]:
    """Rows as the JSON file has them."""
    return {label: [Outcome(**run) for run in runs] for label, runs in rows.items()}


def spreads(measures: Iterable[str], *runs: Sequence[Outcome]) -> list[str]:
    """Mean ± deviation of each measure, for one or several lists of outcomes."""
    return [spread([getattr(o, measure) for o in outcomes]) for measure in measures for outcomes in runs]


def short_table(rows: Mapping[str, Sequence[Outcome]], shown: Mapping[str, str]) -> list[str]:
    """The rows that answer the question; ``shown`` are their labels and what the page calls them."""
    columns = {"AA": "aa", "FM": "fm", "task-inc. AA": "ti"}
    cells = [[name, *spreads(columns.values(), rows[label])] for label, name in shown.items()]
    return markdown_table(["method", *columns], cells, numbers=len(columns))


def table(rows: Mapping[str, Sequence[Outcome]], weights: Mapping[str, str]) -> list[str]:
    cells = []
    for label, outcomes in rows.items():
        seconds = statistics.mean(o.seconds for o in outcomes)
        cells.append([label, weights.get(label, "-"), *spreads(COLUMNS.values(), outcomes), f"{seconds:.0f}"])
    return markdown_table(["method", "weight", *COLUMNS, "s per run"], cells)


def gain(rows: Sequence[Outcome], base: Sequence[Outcome], key: str) -> str:
    """Paired difference over the seeds: mean ± standard error."""
    return paired_gain([getattr(o, key) for o in rows], [getattr(o, key) for o in base])
