"""Several processes: the results of one, through Ctrl-C and the death of a process."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infssm._machine import RUNS_AT_ONCE, cores_here, memory_here
from infssm.bench.executors import Experiment, InProcess, LocalProcesses, gather, make_plan, results
from infssm.bench.executors.local import describe_exit
from infssm.bench.executors.worker import Reporter
from infssm.bench.running import run
from infssm.errors import ConfigError
from infssm.learner.config.fields import RunConfig
from infssm.learner.events import Interrupted
from infssm.learner.result import Result
from tests.learner.tiny import assert_same, tiny_config

ROOT = Path(__file__).resolve().parents[3]


def grid(out: Path) -> list[RunConfig]:
    return [tiny_config(out, name, seed=seed) for seed in (0, 1) for name in ("seq", "lwf-ac+lda")]


def signal_all(number: int) -> None:
    """As a terminal does: to every process of the command."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
    signal.raise_signal(number)


def test_ctrl_c_then_a_killed_process_then_the_results_of_one_process(tmp_path: Path) -> None:
    jobs, seen = make_plan(grid(tmp_path / "many")), []

    def ctrl_c(job: Experiment, task: int, aa: float) -> bool:
        seen.append(job)
        signal_all(signal.SIGINT)
        return True

    with pytest.raises(Interrupted, match="the same command continues"):
        list(LocalProcesses(2).run(jobs, quiet=True, watch=ctrl_c))
    assert len(seen) == 1
    assert multiprocessing.active_children() == []
    killed = []

    def kill(job: Experiment, task: int, aa: float) -> bool:
        if not killed:
            [*_, child] = multiprocessing.active_children()
            killed.append(child)
            os.kill(child.pid, signal.SIGKILL)
        return True

    ends = list(LocalProcesses(2).run(jobs, quiet=True, watch=kill))
    assert [end.error for end in ends] == [None] * 4
    assert len(killed) == 1
    again = list(LocalProcesses(2).run(jobs, quiet=True))  # nothing is left to do, so no process is started
    assert {end.experiment for end in again if end.result is not None} == set(jobs)
    found: dict[Experiment, Result | None] = {end.experiment: end.result for end in ends}
    alone = results(gather(InProcess(), make_plan(grid(tmp_path / "one")), quiet=True))
    for job, result in zip(jobs, alone, strict=True):
        assert found[job].path.relative_to(tmp_path / "many") == result.path.relative_to(tmp_path / "one")
        assert_same(found[job], result)
    single = run(tiny_config(tmp_path / "single", "lwf-ac+lda", seed=1), quiet=True)  # alone: the same hash and weights
    assert single.path.relative_to(tmp_path / "single") == alone[-1].path.relative_to(tmp_path / "one")
    assert_same(single, alone[-1])


def test_ctrl_c_while_processes_are_started_does_not_end_the_fork_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.executors.interrupted", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_whose_starter_is_gone_saves_and_leaves(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    reporter = Reporter(there, asks=False)
    assert not reporter.control.stopping
    here.close()
    with pytest.raises(Interrupted):
        run(tiny_config(tmp_path / "a"), listen=reporter, control=reporter.control)
    assert list(tmp_path.rglob("last.ckpt"))
    assert reporter.receive() is None
    assert_same(run(tiny_config(tmp_path / "a"), quiet=True), run(tiny_config(tmp_path / "b"), quiet=True))


def test_processes_share_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    whole = memory_here()
    monkeypatch.setenv(RUNS_AT_ONCE, "3")
    assert cores_here() == 2
    assert memory_here() == (whole and whole // 3)
    monkeypatch.setenv(RUNS_AT_ONCE, "100")
    assert cores_here() == 1


def test_ends_of_processes_in_words() -> None:
    assert "SIGKILL, as the system does where memory runs out" in describe_exit(-signal.SIGKILL)
    assert describe_exit(3) == "its process left with exit code 3"


def test_no_process_is_too_few() -> None:
    with pytest.raises(ConfigError, match="--jobs 0"):
        LocalProcesses(0)
