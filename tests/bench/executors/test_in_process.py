"""One run after the other: what is shared, what is asked, what fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infssm.bench.executors import Finished, InProcess, Job, StoppedError, gather, make_plan, results
from infssm.bench.reports.tables import write_comparison
from infssm.bench.running import run
from infssm.errors import ConfigError, InfssmError
from infssm.learner.store.directory import RunDirectory, find_runs
from tests.learner.tiny import assert_same, tiny_config


def test_task_0_is_shared(tmp_path: Path) -> None:
    jobs = make_plan(tiny_config(tmp_path, name) for name in ("seq", "lwf-ac"))
    first, second = results(gather(InProcess(), jobs, quiet=True))
    assert first.matrix.values[0, 0] == second.matrix.values[0, 0]
    assert second.config.train.task0 == str(first.path.resolve() / "checkpoints" / "task_00.safetensors")
    assert [first.path, second.path] == [job.path for job in jobs]
    comparison, page = write_comparison([RunDirectory(job.path) for job in jobs], tmp_path / "digits-2")
    assert [row.label for row in comparison.rows] == ["seq", "lwf-ac"]
    assert page.read_text().startswith("<!doctype html>")
    assert {p.suffix for p in page.parent.glob("comparison.*")} == {".html", ".md", ".csv", ".tex"}
    assert len(find_runs([tmp_path])) == 2


def test_jobs_are_asked_for_after_results_are_told(tmp_path: Path) -> None:
    told: list[float] = []

    def ask() -> Iterator[Job]:
        for number in range(3):
            assert len(told) == number
            yield Job(tiny_config(tmp_path, seed=number))

    for end in InProcess().run(ask(), quiet=True):
        assert end.result is not None
        told.append(end.result.aa)
    assert len(told) == 3


def test_a_watched_run_ends_after_a_task_and_can_be_resumed(tmp_path: Path) -> None:
    job, seen = Job(tiny_config(tmp_path / "a")), []

    def watch(which: Job, task: int, aa: float) -> bool:
        seen.append((which, task))
        assert 0 <= aa <= 1
        return False

    [end] = InProcess().run([job], quiet=True, watch=watch)
    assert isinstance(end.error, StoppedError)
    assert seen == [(job, 0)]
    [end] = InProcess().run([job], quiet=True, watch=lambda *_: True)
    assert end.result is not None
    assert_same(end.result, run(tiny_config(tmp_path / "b"), quiet=True))


def test_a_failure_stops_only_those_that_need_it(tmp_path: Path) -> None:
    lost = Job(tiny_config(tmp_path, data={"name": "synthetic-nothing"}))
    jobs = [lost, Job(tiny_config(tmp_path, "ewc"), lost), Job(tiny_config(tmp_path))]
    ends = gather(InProcess(), jobs, quiet=True)
    assert [end.result is not None for end in ends] == [False, False, True]
    assert str(ends[1].error) == "it needs task 0 of seq seed 0, which failed"
    with pytest.raises(ConfigError, match=r"2 of 3 runs failed.*\nseq seed 0: .*\newc seed 0: it needs"):
        results(ends)


def test_one_failure_of_one_run_is_raised_as_it_is() -> None:
    error = InfssmError("why")
    with pytest.raises(InfssmError) as raised:
        results([Finished(Job(tiny_config(Path("runs"))), error=error)])
    assert raised.value is error
