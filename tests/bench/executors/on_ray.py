"""Runs on a Ray cluster of this machine: the results of one process. `make test-ray` runs this, with ray installed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before it is imported

import pytest
import ray

from infssm.bench.executors import Experiment, Finished, InProcess, RayExecutor, gather, make_plan, results
from infssm.bench.executors.ray import _Cluster
from infssm.learner.config.fields import RunConfig
from infssm.learner.events import Interrupted
from tests.learner.tiny import assert_same, tiny_config

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def grid(out: Path) -> list[RunConfig]:
    return [tiny_config(out, name, seed=seed) for seed in (0, 1) for name in ("seq", "lwf-ac+lda")]


def workers() -> list[int]:
    """Processes that carry out a run now; Ray names them so."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if _title(folder).startswith(b"ray::_work")]


def _title(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
    except OSError:  # it has just ended
        return b""


class KillOnce:
    """Kills a process of a run after the first task that is done."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def __call__(self, *_: object) -> bool:
        if not self.killed:
            self.killed.append(workers()[0])
            os.kill(self.killed[0], signal.SIGKILL)
        return True


def check(ends: list[Finished], jobs: list[Experiment], out: Path, alone: Path) -> None:
    assert [end.error for end in ends] == [None] * len(jobs)
    found = {end.experiment: end.result for end in ends}
    serial = results(gather(InProcess(), make_plan(grid(alone)), quiet=True))
    for job, result in zip(jobs, serial, strict=True):
        assert found[job].path.relative_to(out) == result.path.relative_to(alone)
        assert_same(found[job], result)
        assert found[job].config.out == str(out)


def test_ctrl_c_then_a_killed_process_in_a_shared_folder(tmp_path: Path) -> None:
    out = tmp_path / "ray"
    jobs = make_plan(grid(out))

    def ctrl_c(job: Experiment, task: int, aa: float) -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    with pytest.raises(Interrupted, match="the same command continues"):
        list(RayExecutor().run(jobs, quiet=True, watch=ctrl_c))
    assert not list(out.rglob("result.json"))
    kill = KillOnce()
    ends = list(RayExecutor().run(jobs, quiet=True, watch=kill))
    assert kill.killed
    assert not list(out.glob(".shared-*"))
    check(ends, jobs, out, tmp_path / "one")


def test_machines_that_do_not_share_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Cluster, "_mark", lambda *_: tmp_path / "nobody-sees-this")
    out = tmp_path / "ray"
    jobs, kill = make_plan(grid(out)), KillOnce()
    ends = list(RayExecutor().run(jobs, quiet=True, watch=kill))
    assert kill.killed
    check(ends, jobs, out, tmp_path / "one")
    assert all(end.result.report.is_file() for end in ends)
