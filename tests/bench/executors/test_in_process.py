"""One run after the other: what is shared, what is asked, what fails."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from infssm.bench.executors import Experiment, Finished, InProcess, StoppedError, gather, make_plan, results
from infssm.bench.reports.tables import write_comparison
from infssm.bench.running import resume, run
from infssm.errors import ConfigError, InfssmError
from infssm.learner.events import Control, Event, Interrupted, Note
from infssm.learner.result import Result
from infssm.learner.store.directory import RunDirectory, find_runs
from tests.learner.test_resume import broken_at, signalled
from tests.learner.tiny import assert_same, tiny_config


@pytest.fixture(scope="module")
def er_alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tiny_config(tmp_path_factory.mktemp("alone"), "er"), quiet=True)


def test_alone_and_in_a_grid_it_is_one_run(er_alone: Result, tmp_path: Path) -> None:
    jobs = make_plan(tiny_config(tmp_path, name) for name in ("lwf-ac", "er"))
    first, second = results(gather(InProcess(), jobs, quiet=True))
    assert first.matrix.values[0, 0] == second.matrix.values[0, 0]
    assert second.path.name == er_alone.path.name
    assert_same(second, er_alone)
    assert [first.path, second.path] == [job.path for job in jobs]
    assert len(list((tmp_path / "digits-2" / "task0").iterdir())) == 1
    comparison, page = write_comparison([RunDirectory(job.path) for job in jobs], tmp_path / "digits-2")
    assert [row.label for row in comparison.rows] == ["lwf-ac", "er"]
    assert page.read_text().startswith("<!doctype html>")
    assert {p.suffix for p in page.parent.glob("comparison.*")} == {".html", ".md", ".csv", ".tex"}
    assert len(find_runs([tmp_path], complete=False)) == 2


def test_the_log_of_a_run_has_the_training_of_its_task_0(er_alone: Result) -> None:
    lines = RunDirectory(er_alone.path).metrics()
    steps = [(line["task"], line["at"]) for line in lines if line["kind"] == "step"]
    assert steps == [(at > 6, at) for at in range(1, 13)]
    assert er_alone.seconds > sum(line["seconds"] for line in lines if line["kind"] == "epoch" and line["task"] == 0)


@pytest.mark.parametrize("at", [2, 5])
def test_a_task_0_that_was_interrupted_is_continued_by_another_run(er_alone: Result, tmp_path: Path, at: int) -> None:
    with broken_at(at, signalled), pytest.raises(Interrupted, match=r"infssm resume .*/lwf-ac/"):
        run(tiny_config(tmp_path, "lwf-ac"), quiet=True)
    [first] = (tmp_path / "digits-2" / "task0").iterdir()
    assert not (first / "checkpoints" / "task_00.safetensors").exists()
    assert_same(run(tiny_config(tmp_path, "er"), quiet=True), er_alone)
    assert [path.name for path in (first / "checkpoints").iterdir()] == ["task_00.safetensors"]
    with pytest.raises(ConfigError, match="task-0 model of other runs"):
        resume(first)


def test_a_task_0_that_another_process_trains_is_waited_for(er_alone: Result, tmp_path: Path) -> None:
    experiment, notes, other = Experiment.of(tiny_config(tmp_path, "er")), [], ExitStack()
    assert experiment.task0 is not None
    first = RunDirectory(experiment.task0.path)
    first.make()
    other.enter_context(first.lock())

    def leave(event: Event) -> None:
        """The other process leaves when it is waited for."""
        if isinstance(event, Note):
            notes.append(event.text)
            other.close()

    with pytest.raises(Interrupted, match="infssm resume"):
        run(experiment, quiet=True, control=Control(lambda: True))
    assert_same(run(experiment, listen=leave), er_alone)
    assert notes[0].startswith("waiting for the task-0 model that another process trains")


def test_overwriting_trains_task_0_once_more(tmp_path: Path) -> None:
    jobs = make_plan(tiny_config(tmp_path, name) for name in ("seq", "lwf-ac"))
    gather(InProcess(), jobs, quiet=True)
    model = jobs[0].task0_weights
    assert model is not None
    before = model.stat().st_mtime_ns
    seen = [model.stat().st_mtime_ns for _ in InProcess().run(jobs, quiet=True, overwrite=True)]
    assert seen[0] == seen[1] > before


def test_a_task_0_that_cannot_be_removed_fails_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = make_plan(tiny_config(tmp_path, name, seed=seed) for name, seed in (("seq", 0), ("seq", 1)))

    def refuse(experiment: Experiment) -> None:
        if experiment == jobs[0]:
            raise OSError("read-only folder")

    monkeypatch.setattr("infssm.bench.executors.executor.forget_task0", refuse)
    first, second = gather(InProcess(), jobs, quiet=True, overwrite=True)
    assert str(first.error) == "read-only folder"
    assert second.error is None
    assert second.result is not None


def test_other_data_make_another_task_0(tmp_path: Path) -> None:
    """A folder of data may change under its name."""
    rng = np.random.default_rng(0)
    weights = []
    for _ in range(2):
        x, y = rng.integers(0, 255, (80, 8, 8), np.uint8), np.arange(80) % 4
        np.savez(
            tmp_path / "own.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:], classes=list("abcd")
        )
        config = tiny_config(tmp_path / "runs", data={"name": str(tmp_path / "own.npz")})
        run(config, quiet=True, overwrite=True)
        path = Experiment.of(config).task0_weights
        assert path is not None
        weights.append(path.read_bytes())
    assert weights[0] != weights[1]


def test_jobs_are_asked_for_after_results_are_told(tmp_path: Path) -> None:
    told: list[float] = []

    def ask() -> Iterator[Experiment]:
        for number in range(3):
            assert len(told) == number
            yield Experiment.of(tiny_config(tmp_path, seed=number))

    for end in InProcess().run(ask(), quiet=True):
        assert end.result is not None
        told.append(end.result.aa)
    assert len(told) == 3


def test_a_watched_run_ends_after_a_task_and_can_be_resumed(tmp_path: Path) -> None:
    job, seen = Experiment.of(tiny_config(tmp_path / "a")), []

    def watch(which: Experiment, task: int, aa: float) -> bool:
        seen.append((which, task))
        assert 0 <= aa <= 1
        return False

    [end] = InProcess().run([job], quiet=True, watch=watch)
    assert isinstance(end.error, StoppedError)
    assert seen == [(job, 0)]
    [end] = InProcess().run([job], quiet=True, watch=lambda *_: True)
    assert end.result is not None
    assert_same(end.result, run(tiny_config(tmp_path / "b"), quiet=True))


def test_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    configs = [tiny_config(tmp_path, data={"name": "synthetic-nothing"}), tiny_config(tmp_path)]
    ends = gather(InProcess(), map(Experiment.of, configs), quiet=True)
    assert [end.result is not None for end in ends] == [False, True]
    with pytest.raises(ConfigError, match=r"1 of 2 runs failed.*\nseq seed 0: "):
        results(ends)


def test_one_failure_of_one_run_is_raised_as_it_is() -> None:
    error = InfssmError("why")
    with pytest.raises(InfssmError) as raised:
        results([Finished(Experiment(tiny_config(Path("runs"))), error=error)])
    assert raised.value is error
