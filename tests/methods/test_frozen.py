from __future__ import annotations

from pathlib import Path

import torch

from infssm.bench.running import run
from infssm.learner.store.directory import RunDirectory
from infssm.methods import attach, build_method
from infssm.models.features import features
from tests.compare import identical
from tests.learner.tiny import tiny_config
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def train(method, task: toys.Task) -> None:
    method.begin_task(task)
    method.module.train()
    optimizer = torch.optim.AdamW(method.module.parameters(), lr=1e-2, weight_decay=0.1)  # all of them, as users do
    for batch in toys.loader(task):
        toys.total(method.loss(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step()
    method.end_task(task)


def test_the_first_task_is_plain_training_and_later_ones_train_the_classifier() -> None:
    plain, frozen = build_method(toys.vim(), "seq"), build_method(toys.vim(), "frozen")
    for method in (plain, frozen):
        train(method, TASKS[0])
    before = weights(frozen.module)
    assert all(identical(value, before[key]) for key, value in weights(plain.module).items())
    train(frozen, TASKS[1])
    changed = {key for key, value in weights(frozen.module).items() if not identical(value, before[key])}
    assert changed == {"head.weight", "head.bias"}


def test_the_step_is_cross_entropy_of_the_features_and_modes_stay() -> None:
    method, batch = build_method(toys.vim(), "frozen"), toys.batch(TASKS[1])
    method.begin_task(TASKS[1])
    model = method.module.train()
    term = method.loss(batch)["ce"]
    logits = model.head(features(model, batch.x))[:, 2:4]
    torch.testing.assert_close(term, torch.nn.functional.cross_entropy(logits, batch.y - 2))
    assert all(child.training for child in model.modules())


def test_a_restored_method_is_frozen_too() -> None:
    method, other = build_method(toys.vim(), "frozen"), build_method(toys.vim(), "frozen")
    method.begin_task(TASKS[1])
    other.load_state_dict(method.state_dict())
    assert {n for n, p in other.module.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}


def test_in_a_loop_of_ones_own_gradients_stop_at_the_classifier() -> None:
    method = attach(toys.vim(), "frozen+ncm", num_classes=CLASSES)
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0], toys.loader(TASKS[0]))
    method.begin_task(TASKS[1])
    method.module(toys.batch(TASKS[1]).x).sum().backward()
    assert {n for n, p in method.module.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}


def test_a_run_with_a_fitted_head_trains_the_first_task_only(tmp_path: Path) -> None:
    epochs = {}
    for name in ("frozen", "frozen+ncm"):
        lines = RunDirectory(run(tiny_config(tmp_path, name), quiet=True).path).metrics()
        epochs[name] = {line["task"] for line in lines if line["kind"] == "epoch"}
        assert sum(line["kind"] == "task" for line in lines) == 2
    assert epochs == {"frozen": {0, 1}, "frozen+ncm": {0}}
