"""`Sweep`: takes trials from a shared folder, has an executor run them, stores their results there and reports them."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from infssm._files import atomic_file, write_text
from infssm.bench.executors import Executor, Experiment, Finished, StoppedError
from infssm.bench.presets import plan
from infssm.bench.sweeps.space import ends_of, overrides_of, parse_space
from infssm.bench.sweeps.trials import Trial, Trials, propose
from infssm.errors import ConfigError, DivergedError, InfssmError
from infssm.learner.config.load import load_config, to_dict
from infssm.learner.metrics import ACCURACY, Quantity
from infssm.learner.scoring import score_of
from infssm.learner.setup import load_stream
from infssm.learner.store.directory import RunDirectory

_PAUSE = 1.0
"""Seconds between two checks of what other processes have finished."""


@dataclass
class _Work:
    """A trial that this process works on. ``over`` counts the jobs that ended, or were not begun because it stopped."""

    number: int
    jobs: list[Experiment]
    values: list[float] = field(default_factory=list)
    stopped: bool = False
    error: str | None = None
    over: int = 0


class Sweep:
    """A search for the settings with the best AA (for text, the fewest bits) on validation data, averaged over seeds.

    Args:
        source: what to start from: a config file, its values, or None for the main job's settings.
        overrides: settings, fixed or with a range or list of values (see :func:`parse_space`).
        seeds: seeds of the runs of every trial.
        search_seed: seed of the proposals.
        out: folder under which the search has a folder of its own, which other processes join by the same call.
        data_root: folder that holds the data.
    """

    def __init__(
        self,
        source: Mapping[str, Any] | Path | None,
        overrides: Sequence[str],
        *,
        seeds: Sequence[int] = (0,),
        search_seed: int = 0,
        out: str = "runs",
        data_root: str | None = None,
    ) -> None:
        try:
            import optuna
        except ImportError:
            raise InfssmError("`infssm sweep` needs optuna: pip install 'infssm[sweep]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._source, self._data_root, self.seeds = source, data_root, list(seeds)
        self.fixed, self.space = parse_space(overrides)
        if not self.space:
            raise ConfigError(
                "nothing is searched: give a setting a range, such as method.weight=log:1e-2..1e6, or values, such as "
                "train.lr=1e-3,1e-4"
            )
        self._identity = {
            "source": {} if source is None else to_dict(load_config(source)),
            "overrides": sorted(overrides),
            "seeds": self.seeds,
            "search_seed": search_seed,
        }
        name = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:8]
        self.folder = Path(out).expanduser() / f"sweep-{name}"
        for params in ends_of(self.space):  # settings no trial could run with are reported before the first one starts
            if len(self._plan(overrides_of(self.space, params))) != len(self.seeds):
                raise ConfigError("a search is for one method: name it, such as method=inf-ssm-exact")
        self._seed = search_seed
        self._work: dict[Experiment, _Work] = {}

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self.folder, self.space, self._identity, self._seed, self.measure.sign)

    @cached_property
    def measure(self) -> Quantity:
        """The objective: accuracy, or bits of language, for which lower is better."""
        stream = load_stream(self.first_trial()[0].config)
        return score_of(stream).quantity(stream)

    def first_trial(self) -> list[Experiment]:
        """The settings of the first trial; nothing is written."""
        params = propose(self.space, [], self._seed)
        assert params is not None
        return self._plan(overrides_of(self.space, params))

    def trials(self) -> list[Trial]:
        """All trials so far, by number."""
        return self._trials.all()

    def run(
        self, executor: Executor, *, trials: int | None = 20, seconds: float | None = None, quiet: bool = False
    ) -> list[Trial]:
        """Work until there are ``trials`` trials, or no new one is begun after ``seconds``; all trials, by number.

        Waits for trials of other processes, and takes them over if those die.
        """
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        try:
            while True:
                for end in executor.run(self._jobs(trials, deadline), quiet=quiet, watch=self._watch):
                    self._take(end)
                trials_so_far = self.trials()
                if time.monotonic() >= deadline or all(trial.state != "running" for trial in trials_so_far):
                    return trials_so_far
                time.sleep(_PAUSE)
        finally:
            self._trials.release()

    def best(self) -> Trial | None:
        """The complete trial with the best objective; the earliest of several."""
        complete = [trial for trial in self.trials() if trial.state == "complete"]
        return max(complete, key=lambda trial: (self.measure.sign * (trial.value or 0), -trial.number), default=None)

    def settings(self, trial: Trial) -> list[str]:
        """The searched settings of a trial, as they are written on the command line."""
        return overrides_of(self.space, trial.params)

    @property
    def objective(self) -> str:
        """The name of the objective in tables: ``AA``, or the measure's own for language."""
        return "AA" if self.measure == ACCURACY else self.measure.title

    def rows(self) -> list[tuple[str, str, str]]:
        """Complete trials, best first, then the others: number, objective or what became of it, settings."""
        measure = self.measure

        def outcome(trial: Trial) -> str:
            if trial.state == "complete":
                return measure.show(trial.value or 0)
            if trial.state == "running":
                return "unfinished"
            if trial.error is not None:
                return "diverged"
            last = max(trial.reports)
            return f"stopped at {measure.show(trial.reports[last])} after step {last + 1}"

        ordered = sorted(self.trials(), key=lambda t: (t.state != "complete", -measure.sign * (t.value or 0), t.number))
        return [(str(trial.number), outcome(trial), " ".join(self.settings(trial))) for trial in ordered]

    def winners_command(self, start: Sequence[str]) -> str | None:
        """The command that runs the winner on test data; ``start``: the options that say what the search began with."""
        best = self.best()
        if best is None:
            return None
        seeds = ["--seed", *map(str, self.seeds)]
        return shlex.join(["infssm", "run", *start, *self.fixed, *self.settings(best), *seeds])

    def write_findings(self, command: str | None) -> Path:
        """Write ``sweep.md`` and ``sweep.png`` into the folder of the search; the path of the first."""
        name, rows = self.objective, self.rows()
        lines = [
            "# Search",
            "",
            f"{len(rows)} trials; {name} in {self.measure.unit} on validation data, mean over seeds {self.seeds}.",
        ]
        if command is not None:
            lines += ["", "Best, to be run on test data:", "", f"    {command}"]
        lines += [
            "",
            f"![{name} against each setting](sweep.png)",
            "",
            f"| trial | {name} | settings |",
            "|---|---|---|",
        ]
        lines += [f"| {number} | {outcome} | `{settings}` |" for number, outcome, settings in rows]
        path = self.folder / "sweep.md"
        write_text(path, "\n".join(lines) + "\n")
        with atomic_file(self.folder / "sweep.png") as file:
            self._figure().savefig(file, format="png", dpi=120)
        return path

    def _figure(self) -> Any:
        """The objective against each setting, a panel each; the best is marked."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.2 * len(self.space), 3), layout="constrained")
        panels: Any = figure.subplots(1, len(self.space), sharey=True, squeeze=False)[0]
        best, complete = self.best(), [trial for trial in self.trials() if trial.state == "complete"]
        part: Any
        for panel, (key, part) in zip(panels, self.space.items(), strict=True):
            choices = getattr(part, "choices", None)
            for trial in complete:
                x = choices.index(trial.params[key]) if choices else trial.params[key]
                style = {"color": "tab:red", "zorder": 3} if trial == best else {"color": "tab:blue", "alpha": 0.6}
                panel.plot([x], [self.measure.scale * (trial.value or 0)], "o", **style)
            if choices:
                panel.set_xticks(range(len(choices)), choices, rotation=30)
            elif part.log:
                panel.set_xscale("log")
            panel.set_xlabel(key)
        panels[0].set_ylabel(f"{self.objective} on validation data, {self.measure.unit}")
        return figure

    def _plan(self, settings: Sequence[str]) -> list[Experiment]:
        return plan(
            self._source,
            [*self.fixed, *settings, "data.evaluate=val"],
            seeds=self.seeds,
            data_root=self._data_root,
            out=str(self.folder / "runs"),
        )

    def _jobs(self, budget: int | None, deadline: float) -> Iterator[Experiment]:
        """Jobs of one trial after the other; the next trial is chosen when a slot is free."""
        while (trial := self._trials.take(0 if time.monotonic() >= deadline else budget)) is not None:
            jobs = [
                replace(job, label=f"trial {trial.number} seed {job.config.seed}")
                for job in self._plan(self.settings(trial))
            ]
            work = _Work(trial.number, jobs)
            self._work |= dict.fromkeys(jobs, work)
            for job in jobs:
                # Tasks that the run did before its trial was left behind are reported as if they were done now.
                directory = RunDirectory(job.path)
                if directory.is_run and directory.saved_tasks:
                    for task, aa in enumerate(directory.matrix().aa_curve):
                        if not self._watch(job, task, float(aa)):
                            break
                if work.stopped:
                    self._over(work)
                else:
                    yield job

    def _watch(self, job: Experiment, task: int, aa: float) -> bool:
        work, data = self._work[job], job.config.data
        tasks = 1 if data.online else data.num_tasks
        last = job is work.jobs[-1] and task == tasks - 1
        good = self._trials.report(work.number, work.jobs.index(job) * tasks + task, aa)
        work.stopped = work.stopped or not (good or last)
        return not work.stopped

    def _take(self, end: Finished) -> None:
        """A job is over."""
        work = self._work[end.experiment]
        if end.result is not None:
            work.values.append(end.result.aa)
        elif isinstance(end.error, DivergedError):
            work.stopped, work.error = True, str(end.error)
        elif not isinstance(end.error, StoppedError):
            assert end.error is not None
            raise end.error
        self._over(work)

    def _over(self, work: _Work) -> None:
        work.over += 1
        if work.over == len(work.jobs):
            value = None if work.stopped else sum(work.values) / len(work.jobs)
            self._trials.tell(work.number, value, work.error)
            for job in work.jobs:
                del self._work[job]
