"""The protocol of a run: hooks in order, best epoch, start from weights, what is written."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infssm.bench.running import run
from infssm.errors import CheckpointError, ConfigError
from infssm.learner import loop as loop_module
from infssm.learner.evaluate import evaluate_run
from infssm.learner.events import (
    Control,
    EpochDone,
    Event,
    Interrupted,
    Note,
    RunBegan,
    RunEnded,
    StepDone,
    TaskBegan,
    TaskEnded,
)
from infssm.learner.loop import Loop
from infssm.learner.result import Result
from infssm.learner.saving import load_checkpoint
from infssm.learner.scoring import Accuracy
from infssm.learner.setup import build
from infssm.learner.store.directory import RunDirectory
from infssm.methods import Method
from tests.compare import identical
from tests.learner.tiny import assert_same, final_weights, tiny_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tiny_config(tmp_path_factory.mktemp("finished")), quiet=True)


def test_hooks_come_in_the_documented_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("begin_task", "param_groups", "begin_epoch", "loss", "after_step", "end_epoch", "end_task"):
        original = getattr(Method, name)

        def noted(self: Method, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Method, name, noted)
    tested = loop_module.evaluate_seen
    monkeypatch.setattr(loop_module, "evaluate_seen", lambda *a: (calls.append("test"), tested(*a))[1])
    run(tiny_config(tmp_path, train={"limit_batches": 1, "task0": "own"}), quiet=True)
    epoch = ["begin_epoch", "loss", "after_step", "end_epoch"]
    assert calls == 2 * ["begin_task", "param_groups", *epoch, *epoch, "end_task", "test"]


def test_best_epoch_is_restored_before_the_task_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {(0, 0): 0.5, (0, 1): 0.5, (1, 0): 0.2, (1, 1): 0.7}
    weights: dict[tuple[int, int], torch.Tensor] = {}
    at_end: list[torch.Tensor] = []
    end_task, validate = Method.end_task, Loop.validate

    def pretend(fabric: Any, setup: Any, task: Any, *, seen: int, part: str = "test") -> Accuracy:
        return Accuracy(current[0], current[0], 1)

    current = [0.0]

    def judged(self: Loop, task: Any, epoch: int, optimizer: Any) -> None:
        current[0] = values[task.index, epoch]
        weights[task.index, epoch] = self.setup.method.module.head.weight.detach().clone()  # type: ignore[union-attr]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop_module, "evaluate", pretend)
            validate(self, task, epoch, optimizer)

    def noted(self: Method, task: Any, loader: Any = None, images: Any = None) -> None:
        at_end.append(self.module.head.weight.detach().clone())  # type: ignore[union-attr]
        end_task(self, task, loader, images)

    monkeypatch.setattr(Loop, "validate", judged)
    monkeypatch.setattr(Method, "end_task", noted)
    result = run(tiny_config(tmp_path, train={"task0": "own"}), quiet=True)
    assert identical(at_end[0], weights[0, 0])  # a tie keeps the earlier epoch
    assert not identical(weights[0, 0], weights[0, 1])
    assert identical(at_end[1], weights[1, 1])
    lines = RunDirectory(result.path).metrics()
    assert [line["best_epoch"] for line in lines if line["kind"] == "task"] == [0, 1]


def test_without_selection_the_last_epoch_stays_and_is_the_only_one_validated(tmp_path: Path) -> None:
    result = run(tiny_config(tmp_path, train={"select_best": False}), quiet=True)
    assert not list(result.path.rglob("best_*"))
    validated = [line["val"] is not None for line in RunDirectory(result.path).metrics() if line["kind"] == "epoch"]
    assert validated == [False, True] * 2


def test_everything_needed_to_repeat_is_written(finished: Result) -> None:
    names = {p.name for p in finished.path.iterdir()}
    assert names >= {
        "config.yaml",
        "env.json",
        "split.json",
        "metrics.jsonl",
        "accuracy_matrix.csv",
        "result.json",
        "checkpoints",
        "report.html",
    }
    assert {p.name for p in (finished.path / "checkpoints").glob("task_*")} == {
        "task_00.safetensors",
        "task_01.safetensors",
    }
    env = RunDirectory(finished.path).env()
    assert env["threads"] == 1
    assert env["packages"]["torch"]
    stored = json.loads((finished.path / "result.json").read_text())
    assert stored["aa"] == finished.aa
    assert stored["matrix"] == finished.matrix.to_json()


def test_the_same_run_twice_is_the_same(finished: Result, tmp_path: Path) -> None:
    assert_same(run(tiny_config(tmp_path), quiet=True), finished)


def test_seeds_differ(finished: Result, tmp_path: Path) -> None:
    other = run(tiny_config(tmp_path, seed=1), quiet=True)
    assert not identical(final_weights(other)["head.weight"], final_weights(finished)["head.weight"])


def test_complete_runs_are_not_repeated(finished: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "train", lambda _: pytest.fail("trained again"))
    again = run(finished.config, quiet=True)
    assert again.path == finished.path
    assert again.aa == finished.aa


def test_start_weights_skip_task_0(finished: Result, tmp_path: Path) -> None:
    start = finished.path / "checkpoints" / "task_00.safetensors"
    result = run(tiny_config(tmp_path, "lwf-ac", train={"task0": str(start)}), quiet=True)
    assert result.matrix.values[0, 0] == finished.matrix.values[0, 0]
    assert {line["task"] for line in RunDirectory(result.path).metrics() if line["kind"] == "step"} == {1}
    same = run(tiny_config(tmp_path, "seq", train={"task0": str(start)}), quiet=True)
    assert_same(same, finished)


@pytest.mark.parametrize("content", [None, b"not weights"])
def test_start_weights_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "start.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        run(tiny_config(tmp_path, train={"task0": str(path)}), quiet=True)


def test_start_weights_of_another_model(finished: Result, tmp_path: Path) -> None:
    start = str(finished.path / "checkpoints" / "task_00.safetensors")
    config = tiny_config(tmp_path, model={"options": {"embed_dim": 32}}, train={"task0": start})
    with pytest.raises(CheckpointError, match="do not fit the model"):
        run(config, quiet=True)


def test_joint_trains_on_all_tasks_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = [set(), set()]
    step = Loop.step

    def noted(self: Loop, batch: Any, task: Any, optimizer: Any) -> Any:
        seen[task.index] |= set(batch.y.tolist())
        return step(self, batch, task, optimizer)

    monkeypatch.setattr(Loop, "step", noted)
    run(tiny_config(tmp_path, "joint", train={"limit_batches": None, "epochs": 1}), quiet=True)
    assert seen == [set(range(5)), set(range(10))]


def test_saved_models_test_the_same_again(finished: Result) -> None:
    for task in (0, 1):
        rows = evaluate_run(finished.path, task)
        assert [r.class_incremental for r in rows] == finished.matrix.values[task, : task + 1].tolist()
    assert evaluate_run(finished.path) == rows
    with pytest.raises(ConfigError, match="not after task 7"):
        evaluate_run(finished.path, 7)


def test_the_stored_confusion_agrees_with_the_accuracies(finished: Result) -> None:
    confusion = RunDirectory(finished.path).confusion()
    assert confusion is not None
    counts = torch.as_tensor(confusion.counts)
    assert counts.sum(1).tolist() == [4] * 10  # true classes are rows: test_per_class images each
    right = counts.diagonal().view(2, 5).sum(1) / 20
    assert right.tolist() == pytest.approx(finished.matrix.values[1].tolist())


def test_mixed_precision_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infssm.learner.devices.bfloat16_unit", lambda: "some")  # slow or not
    result = run(tiny_config(tmp_path, "inf-ssm", train={"precision": "bf16-mixed"}), quiet=True)
    assert all(v.dtype == torch.float32 for v in final_weights(result).values())


def test_checkpoint_dir_holds_no_leftovers(finished: Result) -> None:
    names = {p.name for p in (finished.path / "checkpoints").iterdir()}
    assert {n for n in names if not n.startswith(("task_", "best_01"))} == {"last.ckpt", "last.ckpt.previous"}
    assert load_checkpoint(finished.path / "checkpoints" / "last.ckpt")["position"]["task"] == 2


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(tiny_config(tmp_path, log={"tensorboard": True}), quiet=True)
    events = EventAccumulator(str(result.path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("step/loss/ce")] == list(range(1, 13))
    assert events.Scalars("task/aa")[-1].value == pytest.approx(result.aa)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_loggers_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigError, match=rf"infssm\[{name}\]"):
        run(tiny_config(tmp_path, log={name: True}), quiet=True)


@pytest.mark.parametrize(
    ("changes", "size"), [({}, 8), ({"recipe": "deit"}, 32), ({"recipe": "deit", "image_size": 16}, 16)]
)
def test_images_have_the_size_of_the_data_or_with_deit_of_the_model(tmp_path: Path, changes: dict, size: int) -> None:
    setup = build(tiny_config(tmp_path, data=changes), torch.device("cpu"))
    assert setup.recipe.size == size
    assert setup.method.module.img_size == (size, size)


def test_heads_are_given_training_images_through_the_evaluation_transform(tmp_path: Path) -> None:
    setup = build(tiny_config(tmp_path), torch.device("cpu"))
    task = setup.task(0)
    batches = list(setup.plain_loader(task))
    raw = setup.stream.dataset.images.pixels[torch.from_numpy(task.train.indices)]
    assert torch.equal(torch.cat([batch.x for batch in batches]), setup.recipe.eval(raw))
    assert not torch.equal(torch.cat([batch.x for batch in setup.eval_loader(task, "train")]), setup.recipe.eval(raw))


def test_the_shown_loss_is_refreshed_by_time_and_a_listener_can_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a large ``train.log_every`` the losses that are shown are still those of the step."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), perf_counter=time.perf_counter)
    monkeypatch.setattr(loop_module, "time", clock)
    heard: list[Event] = []
    control = Control()

    def listen(event: Event) -> None:
        heard.append(event)
        if isinstance(event, TaskEnded):
            control.stop()

    config = tiny_config(tmp_path, train={"log_every": 1000, "task0": "own"})
    with pytest.raises(Interrupted):
        run(config, listen=listen, control=control)
    shown = [event for event in heard if isinstance(event, StepDone)]
    assert [event.done for event in shown] == [1, 2, 3, 4, 5, 6]
    assert len({event.terms["ce"] for event in shown}) == 6
    kinds = [type(event) for event in heard if not isinstance(event, StepDone | Note)]
    assert kinds == [RunBegan, TaskBegan, EpochDone, EpochDone, TaskEnded, RunEnded]
    assert_same(
        run(config, quiet=True), run(tiny_config(tmp_path / "other", train=config.train.model_dump()), quiet=True)
    )
