"""Searches: killed and continued, shared, on validation images alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from infssm.bench.executors import Finished, InProcess, StoppedError
from infssm.bench.sweeps import Sweep, Trial
from infssm.bench.sweeps.trials import hopeless, propose
from infssm.cli.app import app
from infssm.data import load_dataset
from infssm.errors import ConfigError
from infssm.learner.result import Result
from infssm.learner.store.directory import find_runs
from tests.bench.sweeps.toy import SEARCHED, TRIALS, toy

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 600


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sweep, Any]:
    """A search that nothing happened to."""
    sweep = toy(tmp_path_factory.mktemp("whole"))
    return sweep, sweep.run(InProcess(), trials=TRIALS, quiet=True)


def start(out: Path, step: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.bench.sweeps.toy", str(out), str(step)], cwd=ROOT)


def test_killed_twice_it_finds_the_same(whole: tuple[Sweep, Any], tmp_path: Path) -> None:
    """In the middle of a run, and in the last step of one: nothing is lost, nothing is done twice."""
    for step in (7, 9):
        assert start(tmp_path, step).wait(PATIENCE) == -9
    sweep = toy(tmp_path)
    before = len(sweep.trials())
    trials = sweep.run(InProcess(), trials=TRIALS, quiet=True)
    assert 1 < before < TRIALS
    assert trials == whole[1]
    assert len({tuple(sweep.settings(trial)) for trial in trials}) == TRIALS
    best, expected = sweep.best(), whole[0].best()
    assert best is not None
    assert expected is not None
    assert best.number == expected.number


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    processes = [start(tmp_path, 0) for _ in range(2)]
    assert [process.wait(PATIENCE) for process in processes] == [0, 0]
    sweep = toy(tmp_path)
    trials = sweep.trials()
    assert [trial.number for trial in trials] == list(range(TRIALS))
    assert all(trial.state != "running" for trial in trials)
    assert len({tuple(sweep.settings(trial)) for trial in trials}) == TRIALS
    assert len(find_runs([tmp_path], complete=False)) == TRIALS


def test_objective_is_the_accuracy_on_validation_images(whole: tuple[Sweep, Any]) -> None:
    sweep, trials = whole
    results = [Result.load(run.path) for run in find_runs([sweep.folder])]
    assert {result.config.data.evaluate for result in results} == {"val"}
    by_lr = {result.config.train.lr: result.aa for result in results}
    for trial in trials:
        if trial.value is not None and trial.state == "complete":
            lr = float(sweep.settings(trial)[0].partition("=")[2])
            assert trial.value == by_lr[lr]


def test_test_images_are_never_looked_at(tmp_path: Path) -> None:
    """The same search on data whose test images are noise with labels in another order, and read as a trap."""
    digits = load_dataset("digits")
    x, y = digits.images.pixels[:600, 0].numpy(), digits.labels[:600]
    rng = np.random.default_rng(0)
    outcomes = []
    for name, x_test, y_test in (
        ("kept", x[500:], y[500:]),
        ("spoilt", rng.integers(0, 255, (100, 8, 8), np.uint8), rng.permutation(y[500:])),
    ):
        path = tmp_path / f"{name}.npz"
        np.savez(path, x_train=x[:500], y_train=y[:500], x_test=x_test, y_test=y_test, classes=np.array(digits.classes))
        data = [f"data.name={path}", "data.test_per_class=null", "data.train_per_class=null"]
        sweep = toy(tmp_path / "runs", [SEARCHED[0], *data])
        outcomes.append(sweep.run(InProcess(), trials=2, quiet=True))
    assert outcomes[0] == outcomes[1]


def test_loading_test_images_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infssm.learner import setup

    original = setup.ImageLoader

    def trap(task: Any, part: str, **options: Any) -> Any:
        assert part != "test", "a test image was asked for"
        return original(task, part, **options)

    monkeypatch.setattr(setup, "ImageLoader", trap)
    trials = toy(tmp_path).run(InProcess(), trials=1, quiet=True)
    assert trials[0].value is not None


def test_several_seeds_are_averaged_and_lists_run_out(tmp_path: Path) -> None:
    sweep = toy(tmp_path, ["train.lr=1e-3,1e-2"], seeds=(0, 1))
    trials = sweep.run(InProcess(), trials=20, quiet=True)
    assert len(trials) == 2
    for trial in trials:
        lr = float(sweep.settings(trial)[0].partition("=")[2])
        values = [r.aa for r in map(Result.load, (d.path for d in find_runs([tmp_path]))) if r.config.train.lr == lr]
        assert len(values) == 2
        assert trial.value == pytest.approx(sum(values) / 2)
        assert len(trial.reports) == 4
    command = sweep.winners_command([])
    assert command is not None
    assert command.endswith("--seed 0 1")


def test_diverged_trials_count_as_bad(tmp_path: Path) -> None:
    sweep = toy(tmp_path, ["train.lr=1e30,1e-3", "train.warmup_epochs=0"])
    states = {sweep.settings(t)[0]: t.state for t in sweep.run(InProcess(), trials=2, quiet=True)}
    assert states == {"train.lr=1e30": "stopped", "train.lr=1e-3": "complete"}


def test_proposals_depend_on_seed_and_trials_alone(whole: tuple[Sweep, Any]) -> None:
    sweep, trials = whole
    first = propose(sweep.space, trials, 0)
    assert propose(sweep.space, list(trials), 0) == first
    assert propose(sweep.space, trials, 1) != first
    assert propose(sweep.space, trials[:3], 0) == trials[3].params


def test_what_is_below_the_median_is_hopeless() -> None:
    others = [Trial(0, {}, "stopped", reports={0: v, 1: v}) for v in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert hopeless(0.29, 1, others)
    assert not hopeless(0.3, 1, others)
    assert not hopeless(0.0, 1, others[:4])
    assert not hopeless(0.0, 2, others)


def test_nothing_to_search_and_no_method(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is searched"):
        toy(tmp_path, ["train.lr=1e-3"])
    with pytest.raises(ConfigError, match="name it"):
        Sweep(None, ["train.lr=1e-3,1e-4"], out=str(tmp_path))
    with pytest.raises(ConfigError, match="unknown setting"):
        toy(tmp_path, ["train.learning=1e-3,1e-4"])


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infssm.learner.config.load import load_config, to_yaml
    from tests.bench.sweeps.toy import SOURCE

    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "toy.yaml").write_text(to_yaml(load_config(SOURCE)))
    words = [
        "sweep",
        "-c",
        str(tmp_path / "toy.yaml"),
        "train.lr=1e-3,1e-2",
        "--trials",
        "2",
        "-o",
        str(tmp_path),
        "-q",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "best, on test data: infssm run -c" in done.output
    [page] = tmp_path.glob("sweep-*/sweep.md")
    assert "| trial | AA | settings |" in page.read_text()
    assert page.with_name("sweep.png").read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, [*words, "--time", "soon"])
    assert isinstance(wrong.exception, ConfigError)


class Pretended:
    """An executor that trains nothing: AA is 1 after task 0, then the better the nearer the rate is to 1e-2."""

    def run(self, jobs: Any, *, watch: Any, **_: Any) -> Any:
        for job in jobs:
            aa = 1 / (1 + abs(np.log10(job.config.train.lr) + 2))
            if all(watch(job, task, value) for task, value in enumerate((1.0, aa))):
                yield Finished(job, SimpleNamespace(aa=aa))  # type: ignore[arg-type]
            else:
                yield Finished(job, error=StoppedError("stopped"))


def test_trials_below_the_median_are_stopped_and_the_best_is_found(tmp_path: Path) -> None:
    sweep = toy(tmp_path, SEARCHED, seeds=(0, 1))
    trials = sweep.run(Pretended(), trials=30)
    stopped = [trial for trial in trials if trial.state == "stopped"]
    assert stopped
    for trial in stopped:
        earlier = [t.reports[1] for t in trials[: trial.number]]
        assert sorted(trial.reports) == [0, 1]  # after task 1 of the first seed
        assert trial.reports[1] < np.median(earlier)
    best = sweep.best()
    assert best is not None
    assert best.value == max(t.value for t in trials if t.state == "complete")
    assert best.value > 0.8  # within a quarter of a decade: 30 of them at random would be as near now and then
    assert len(trials) == 30


class PretendedBits(Pretended):
    """Bits per byte instead of accuracies: the fewer the nearer the rate is to 1e-2."""

    def run(self, jobs: Any, *, watch: Any, **_: Any) -> Any:
        for job in jobs:
            bits = 3 + abs(np.log10(job.config.train.lr) + 2)
            if all(watch(job, task, value) for task, value in enumerate((3.0, bits))):
                yield Finished(job, SimpleNamespace(aa=bits))  # type: ignore[arg-type]
            else:
                yield Finished(job, error=StoppedError("stopped"))


def test_fewer_bits_per_byte_are_better(tmp_path: Path) -> None:
    text = {"data": {"name": "stdlib-text", "num_tasks": 2, "options": {"limit": 2000}}, "model": "mamba_lm_nano"}
    sweep = Sweep({**text, "method": "seq"}, ["train.lr=log:1e-6..1e-1"], seeds=(0, 1), out=str(tmp_path))
    trials = sweep.run(PretendedBits(), trials=16)
    stopped = [trial for trial in trials if trial.state == "stopped"]
    assert stopped
    for trial in stopped:
        assert trial.reports[1] > np.median([t.reports[1] for t in trials[: trial.number]])
    best = sweep.best()
    assert best is not None
    assert best.value == min(t.value for t in trials if t.state == "complete")
    found = sweep.rows()
    assert found[0][0] == str(best.number)
    assert found[0][1] == f"{best.value:.3f}"  # bits, not percent
    assert sweep.settings(best)[0] in str(sweep.winners_command([]))


def test_a_lock_that_can_never_be_taken_is_an_error(tmp_path: Path) -> None:
    """Only "in use" is waited for: where the file cannot be written, waiting would never end."""
    sweep = toy(tmp_path)
    (sweep.folder / "lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot write .*lock"):
        sweep.trials()


def test_a_search_from_a_preset_follows_its_variant(tmp_path: Path) -> None:
    words = ["sweep", "-p", "imagenet-r/5-task/inf-ssm", "train.lr=1e-3,1e-4", "-o", str(tmp_path), "--print-config"]
    shown = [CliRunner().invoke(app, [*words, "--variant", variant]).output for variant in ("paper", "authors-code")]
    assert all("method:" in text for text in shown)
    assert shown[0] != shown[1]


def test_no_trial_begins_after_the_time_is_over(tmp_path: Path) -> None:
    assert toy(tmp_path).run(Pretended(), trials=None, seconds=0) == []
