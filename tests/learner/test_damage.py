"""Every file of a run damaged in every way: an error that names the way out, or the very same numbers."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infssm.bench.running import resume, run, run_path
from infssm.cli.app import invoke
from infssm.errors import CheckpointError, ConfigError, DataError
from infssm.learner.evaluate import evaluate_run
from infssm.learner.events import Interrupted
from infssm.learner.result import Result
from infssm.learner.store.directory import RunDirectory
from tests.learner.test_resume import broken_at, signalled
from tests.learner.tiny import assert_same, tiny_config

STEP_IN_TASK_1 = 10


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes() or b" ")  # a lock that nobody holds is empty
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def other_digit(path: Path) -> None:
    """The last digit, one further: what would go unnoticed in a number."""
    content = bytearray(path.read_bytes())
    where = next((i for i in reversed(range(len(content))) if chr(content[i]).isdigit()), None)
    if where is not None:
        content[where] = ord("0") + (content[where] - ord("0") + 1) % 10
        path.write_bytes(content)


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a bit flipped": flip,
    "another digit": other_digit,
    "noise": lambda path: path.write_bytes(bytes((i * 167 + 89) % 256 for i in range(300))),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "twice": lambda path: path.write_bytes(2 * path.read_bytes()),
    "other JSON": lambda path: path.write_bytes(b"[1, {}]\n"),
    "deep": lambda path: path.write_bytes(b"[" * 20_000),
    "gone": Path.unlink,
    "a folder": replaced_by_folder,
    "a link to nowhere": dangling,
}


class Example(NamedTuple):
    """A complete run and one that was interrupted in its second task, and what all commands say of them."""

    complete: Path
    unfinished: Path
    result: Result
    tested: dict[str, Any]
    report: Any


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    folder = tmp_path_factory.mktemp("runs")
    complete = run(tiny_config(folder / "complete", "si"), quiet=True)
    config = tiny_config(folder / "unfinished", "si")
    with broken_at(STEP_IN_TASK_1, signalled), pytest.raises(Interrupted):
        run(config, quiet=True)
    (complete.path / "thesis.txt").write_text("mine")
    (run_path(config) / "thesis.txt").write_text("mine")
    tested = {name: evaluate_run(path) for name, path in _both(complete.path, run_path(config))}
    return Example(complete.path, run_path(config), complete, tested, _report(complete.path))


def _both(complete: Path, unfinished: Path) -> list[tuple[str, Path]]:
    return [("complete", complete), ("unfinished", unfinished)]


def _report(path: Path) -> Any:
    target = path / "out.json"
    code = invoke(["report", str(path), "-o", str(target)])
    return json.loads(target.read_text())["rows"] if code == 0 else None


def files_of(state: str) -> list[str]:
    """Files of a tiny run, known before one is trained; the test below checks the list."""
    checkpoints = ["last.ckpt", "last.ckpt.previous", "task_00.safetensors", "best_*.ckpt"]
    checkpoints += ["task_01.safetensors"] if state == "complete" else []
    files = ["run.json", "config.yaml", "env.json", "split.json", "stream.json", "metrics.jsonl", "accuracy_matrix.csv"]
    files += ["confusion.json", "lock"]
    files += ["result.json", "report.html"] if state == "complete" else []
    return [*files, *(f"checkpoints/{name}" for name in checkpoints)]


@pytest.mark.parametrize("state", ["complete", "unfinished"])
def test_every_file_is_tried(example: Example, state: str) -> None:
    path: Path = getattr(example, state)
    there = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    tried = {p.relative_to(path).as_posix() for name in files_of(state) for p in path.glob(name)}
    assert there - {"thesis.txt", "out.json"} == tried


CASES = [
    pytest.param(state, name, id=f"{state}-{name}") for state in ("complete", "unfinished") for name in files_of(state)
]


@pytest.mark.parametrize(("state", "name"), CASES)
@pytest.mark.parametrize("command", ["resume", "eval", "report"])
def test_damage_is_told_or_harmless(
    example: Example, tmp_path: Path, capfd: pytest.CaptureFixture[str], state: str, name: str, command: str
) -> None:
    for number, (damage, apply) in enumerate(DAMAGES.items()):
        path = tmp_path / str(number)
        shutil.copytree(getattr(example, state), path)
        for file in path.glob(name):  # which epoch is the best one, if any, is not for this test to say
            apply(file)
        before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name.startswith(("task_", "thesis"))}
        code, message = _call(command, path, example, state, capfd)
        where = f"{name}, {damage}: {message}"
        assert code in (0, 2, 3), where
        if code:
            assert str(path) in message, where
            assert len(message) < 2000, where
        else:
            assert path.joinpath("checkpoints", "last.ckpt").exists() or name.startswith("checkpoints/last"), where
        kept = {p: p.read_bytes() for p in before if p.is_file()}
        assert kept == before, where


def _call(command: str, path: Path, example: Example, state: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command as the command line does; where it succeeds, its numbers must be those of the whole run."""
    if command == "report":
        target = path / "out.json"
        target.unlink(missing_ok=True)
        code = invoke(["report", str(path), "-o", str(target)])
        if code == 0:
            assert json.loads(target.read_text())["rows"] == example.report
        return code, capfd.readouterr().err
    if command == "eval":
        try:
            tested = evaluate_run(path)
        except (CheckpointError, ConfigError, DataError) as error:
            return error.exit_code, str(error)
        assert tested == example.tested[state]
        return 0, ""
    try:
        result = resume(path, quiet=True)
    except (CheckpointError, ConfigError, DataError) as error:
        return error.exit_code, str(error)
    assert result.matrix.to_json() == example.result.matrix.to_json()
    if result.weights.is_file():
        assert_same(result, example.result)
    return 0, ""


def test_there_are_enough_cases() -> None:
    assert len(DAMAGES) >= 10
    assert 3 * len(CASES) * len(DAMAGES) >= 300


def copy(example: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(example, tmp_path / "copy"))


def test_run_that_lost_its_checkpoints_keeps_its_models(example: Example, tmp_path: Path) -> None:
    path = copy(example.unfinished, tmp_path)
    for name in ("last.ckpt", "last.ckpt.previous"):
        (path / "checkpoints" / name).unlink()
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"lost its last\.ckpt.*task_00\.safetensors.*kept.*--overwrite"):
        resume(path, quiet=True)
    assert {p: p.read_bytes() for p in before if p.name != "lock"} == {
        p: c for p, c in before.items() if p.name != "lock"
    }


def test_folder_of_the_user_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    assert invoke(["run", "method=seq", "--print-config"]) == 0
    (tmp_path / "config.yaml").write_text(capfd.readouterr().out)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    assert invoke(["resume", str(tmp_path)]) == 2
    assert "is not a run directory" in capfd.readouterr().err
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_run_of_an_earlier_version_goes_on(example: Example, tmp_path: Path) -> None:
    path = copy(example.unfinished, tmp_path)
    (path / "run.json").unlink()
    (path / "lock").unlink()
    assert_same(resume(path, quiet=True), example.result)
    assert RunDirectory(path).is_run
    assert (path / "thesis.txt").read_text() == "mine"


def test_report_comes_back(example: Example, tmp_path: Path) -> None:
    path = copy(example.complete, tmp_path)
    (path / "report.html").unlink()
    assert resume(path, quiet=True).report.read_text().startswith("<!doctype html>")


def test_eval_says_that_the_last_model_is_missing(example: Example, tmp_path: Path) -> None:
    path = copy(example.complete, tmp_path)
    (path / "checkpoints" / "task_01.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"after tasks 0, not after the last one, task 1.*--task"):
        evaluate_run(path)
    assert len(evaluate_run(path, 0)) == 1


def test_log_shorter_than_its_checkpoint_is_not_padded(example: Example, tmp_path: Path) -> None:
    path = copy(example.unfinished, tmp_path)
    log = path / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:100])
    with pytest.raises(
        DataError, match=r"metrics\.jsonl is damaged: the checkpoint knows \d+ bytes of it, 100 are left"
    ):
        resume(path, quiet=True)
    assert log.stat().st_size == 100
    log.unlink()
    assert_same(resume(path, quiet=True), example.result)
    assert b"\0" not in log.read_bytes()
    assert all(line["task"] == 1 for line in RunDirectory(path).metrics())


def test_report_of_a_folder_names_the_damaged_run(
    example: Example, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(example.complete, tmp_path / "good")
    shutil.copytree(example.complete, tmp_path / "bad")
    (tmp_path / "bad" / "config.yaml").write_bytes(b"\0\xff")
    assert invoke(["report", str(tmp_path), "--json"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["rows"] == example.report
    assert "bad/config.yaml is damaged" in " ".join(shown.err.split())


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_disk_full_at_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Example, nth: int) -> None:
    """The marker, the configuration, the environment, the split: each may be the first that does not fit."""
    config = tiny_config(tmp_path, "si")
    calls = itertools.count(1)

    def full(source: Any, target: Any) -> None:
        if next(calls) == nth:
            raise OSError(28, "No space left on device")
        original(source, target)

    original = os.replace
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"cannot write .*: No space left on device; free some space"):
        run(config, quiet=True)
    monkeypatch.undo()
    assert_same(run(config, quiet=True), example.result)
