"""A run that was killed anywhere and resumed ends with the same bits."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infssm.bench.running import resume, run, run_path
from infssm.errors import CheckpointError, ConfigError, DataError
from infssm.learner.config.fields import RunConfig
from infssm.learner.events import Interrupted
from infssm.learner.loop import Loop
from infssm.learner.result import Result
from infssm.learner.saving import save_checkpoint
from infssm.learner.store.directory import RunDirectory
from tests.learner.dying import in_call, in_step, run_and_die
from tests.learner.tiny import assert_same, tiny_config
from tests.methods.toys import FOR_IMAGES

STEPS = 12
EPOCHS = [(0, 0), (0, 1), (1, 0), (1, 1)]


@contextlib.contextmanager
def broken_at(step: int, act: Callable[[Loop], None]) -> Iterator[None]:
    """Call ``act`` right before the given step of the run is taken."""
    original = Loop.step

    def breaking(self: Loop, *args: Any) -> Any:
        if self.progress.position.at == step:
            act(self)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "step", breaking)
        yield


def signalled(loop: Loop) -> None:
    loop.control.stop()


@pytest.mark.parametrize("method", [*FOR_IMAGES, "er+inf-ssm-exact", "ewc+lwf-ac"])
def test_killed_and_resumed_is_bit_exact(tmp_path: Path, method: str) -> None:
    """Killed inside a step of either task, then told to stop inside an epoch, which saves more than its end does."""
    whole = run(tiny_config(tmp_path / "whole", method), quiet=True)
    config = tiny_config(tmp_path / "broken", method)
    draw = random.Random(method)
    for tasks_steps in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        step = draw.choice(tasks_steps)
        assert run_and_die(config, in_step, step) == -signal.SIGKILL
        assert not RunDirectory(run_path(config)).complete
    with broken_at(draw.randrange(step, STEPS), signalled), pytest.raises(Interrupted):
        resume(run_path(config), quiet=True)
    assert_same(resume(run_path(config), quiet=True), whole)


LORA = {"first_session": "lora", "rank": 2}


@pytest.mark.parametrize(
    ("method", "options", "step"),
    [
        (
            "lwf-f+gda",
            {"mean_token": True, "token_spread": True, "blocks": [1, 2], "mirror": True, "first_model": True},
            8,
        ),
        ("frozen+ranpac", {**LORA, "start_model": True}, 4),
        ("inflora", LORA, 4),
        ("inflora", LORA, 8),
        ("nullspace", {"projection": "rate"}, 8),
        ("nullspace", {"projection": "projector"}, 8),
        ("nullspace", {"projection": "released"}, 8),
    ],
)
def test_options_that_keep_more_between_steps_go_on(
    tmp_path: Path, method: str, options: dict[str, Any], step: int
) -> None:
    """Stopped inside the first task (steps 0 to 5), where LoRA is trained, or the second, where a copy is kept."""
    two_blocks = {"model": {"options": {"depth": 2}}}
    whole = run(tiny_config(tmp_path / "whole", method, options, **two_blocks), quiet=True)
    config = tiny_config(tmp_path / "broken", method, options, **two_blocks)
    with broken_at(step, signalled), pytest.raises(Interrupted):
        run(config, quiet=True)
    assert_same(resume(run_path(config), quiet=True), whole)


def test_random_numbers_inside_an_epoch_go_on_where_they_stopped(tmp_path: Path) -> None:
    """Stochastic depth draws from torch's global generator in every step."""
    options = {"model": {"options": {"depth": 3, "drop_path_rate": 0.6}}}
    whole = run(tiny_config(tmp_path / "whole", **options), quiet=True)
    config = tiny_config(tmp_path / "broken", **options)
    with broken_at(7, signalled), pytest.raises(Interrupted):
        run(config, quiet=True)
    assert_same(resume(run_path(config), quiet=True), whole)


@pytest.mark.parametrize(
    ("step", "number", "code"),
    [
        *((step, signal.SIGKILL, -signal.SIGKILL) for step in (0, 4, 6, 11)),
        *((step, signal.SIGTERM, Interrupted.exit_code) for step in (0, 2, 5, 9, 11)),
    ],
)
def test_every_step_can_be_the_last(tmp_path: Path, whole: Result, step: int, number: int, code: int) -> None:
    config = tiny_config(tmp_path, "si")
    assert run_and_die(config, in_step, step, number) == code
    check_continued(config, whole)


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_killed_while_saving(tmp_path: Path, whole: Result, call: str, nth: int) -> None:
    config = tiny_config(tmp_path, "si")
    assert run_and_die(config, in_call, call, nth) == -signal.SIGKILL
    check_continued(config, whole)


def check_continued(config: RunConfig, whole: Result) -> None:
    """The run goes on to the result of the whole one, and its log tells each step and epoch once."""
    assert not RunDirectory(run_path(config)).complete
    result = run(config, quiet=True)
    assert_same(result, whole)
    lines = RunDirectory(result.path).metrics()
    assert [line["at"] for line in lines if line["kind"] == "step"] == list(range(1, STEPS + 1))
    assert [(line["task"], line["epoch"]) for line in lines if line["kind"] == "epoch"] == EPOCHS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tiny_config(tmp_path_factory.mktemp("whole"), "si"), quiet=True)


def interrupted(tmp_path: Path, step: int = 8) -> Path:
    config = tiny_config(tmp_path, "si")
    with broken_at(step, signalled), pytest.raises(Interrupted, match="infssm resume"):
        run(config, quiet=True)
    return run_path(config)


def test_half_a_checkpoint_is_refused_and_the_previous_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], whole: Result
) -> None:
    path = interrupted(tmp_path)
    last = path / "checkpoints" / "last.ckpt"
    content = last.read_bytes()
    last.unlink()
    last.write_bytes(content[: len(content) // 2])
    assert_same(resume(path), whole)
    assert "truncated" in capfd.readouterr().err


def test_both_checkpoints_damaged_is_an_error(tmp_path: Path) -> None:
    path = interrupted(tmp_path)
    for name in ("last.ckpt", "last.ckpt.previous"):
        (path / "checkpoints" / name).unlink()
        (path / "checkpoints" / name).write_bytes(b"half")
    with pytest.raises(CheckpointError, match="truncated"):
        resume(path, quiet=True)


def test_another_config_is_refused(tmp_path: Path) -> None:
    path = interrupted(tmp_path)
    with pytest.raises(ConfigError, match=r"another configuration \(train.lr: 0.001 != 0.5\)"):
        resume(path, ["train.lr=0.5"], quiet=True)
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text.replace("lr: 0.001", "lr: 0.01"))
    with pytest.raises(ConfigError, match=r"config\.yaml was changed since the run began.*restore it"):
        resume(path, quiet=True)
    (path / "run.json").unlink()  # as a run of an earlier version, without checksums
    with pytest.raises(ConfigError, match="the checkpoint was written with configuration"):
        resume(path, quiet=True)


def test_settings_without_effect_may_change(tmp_path: Path, whole: Result) -> None:
    path = interrupted(tmp_path)
    assert_same(resume(path, ["train.num_workers=0", "train.log_every=2"], quiet=True), whole)


def test_another_split_is_refused(tmp_path: Path) -> None:
    path = interrupted(tmp_path)
    split = json.loads((path / "split.json").read_text())
    split["train"][0], split["test"][0] = split["test"][0], split["train"][0]
    (path / "split.json").write_text(json.dumps(split))
    with pytest.raises(DataError, match="do not match its hash"):
        resume(path, quiet=True)


def test_full_disk_keeps_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Result) -> None:
    config = tiny_config(tmp_path, "si")
    saves = 0

    def fill(path: Path, state: dict[str, Any], **options: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == 3:
            with monkeypatch.context() as patch:
                patch.setattr("os.fsync", _no_space)
                save_checkpoint(path, state, **options)
        save_checkpoint(path, state, **options)

    monkeypatch.setattr("infssm.learner.saving.save_checkpoint", fill)
    with pytest.raises(CheckpointError, match="No space left"):
        run(config, quiet=True)
    monkeypatch.undo()
    assert_same(resume(run_path(config), quiet=True), whole)


def _no_space(_: int) -> None:
    raise OSError(28, "No space left on device")
