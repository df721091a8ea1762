"""The callback in Lightning's own Trainer: the weights and calls of a plain loop over the same data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from infssm._torchvision import torchvision
from tests.integrations.loops import STEPS, Spy, assert_same, calls_of, data, model_and_method

torchvision()  # Lightning's metrics import it

import pytorch_lightning as lightning  # noqa: E402

from infssm.integrations.lightning import ContinualCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers, versions and loggers


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def fit(model: nn.Module, callback: Any, batches: list[Any], **options: Any) -> lightning.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet, **options)
    trainer.fit(Module(model), DataLoader(batches, batch_size=None))
    return trainer


def test_two_tasks(expected: dict[str, Tensor]) -> None:
    model, method = model_and_method()
    callback = ContinualCallback(Spy(method))
    for task in range(2):
        assert callback.task == task
        fit(model, callback, data(task))
    assert_same(model, expected)
    assert callback.method.calls == calls_of(0) + calls_of(1)


def test_accumulation_counts_optimiser_steps(expected: dict[str, Tensor]) -> None:
    model, method = model_and_method()
    callback = ContinualCallback(Spy(method))
    for task in range(2):
        doubled = [batch for batch in data(task) for _ in range(2)]  # the mean over two equal batches is one batch
        fit(model, callback, doubled, accumulate_grad_batches=2)
    assert_same(model, expected)
    assert callback.method.calls.count("after_step") == 2 * STEPS


def test_a_checkpoint_between_tasks_carries_the_method(expected: dict[str, Tensor], tmp_path: Path) -> None:
    model, method = model_and_method()
    trainer = fit(model, ContinualCallback(method), data(0))
    trainer.save_checkpoint(tmp_path / "task0.ckpt")
    saved = torch.load(tmp_path / "task0.ckpt", weights_only=False)
    model, method = model_and_method()
    Module(model).load_state_dict(saved["state_dict"])
    callback = ContinualCallback(method)
    callback.load_state_dict(saved["callbacks"][callback.state_key])
    assert callback.task == 1
    fit(model, callback, data(1))
    assert_same(model, expected)


def test_a_scaled_loss_gets_a_scaled_penalty(expected: dict[str, Tensor]) -> None:
    """Mixed precision with a gradient scaler needs a GPU: a stand-in calls the hooks in Lightning's order."""
    model, method = model_and_method()
    callback = ContinualCallback(method)
    scale = 128.0
    scaler = SimpleNamespace(get_scale=lambda: scale)
    trainer = SimpleNamespace(accumulate_grad_batches=1, precision_plugin=SimpleNamespace(scaler=scaler), global_step=0)
    for task in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callback.on_train_start(trainer, model)
        for index, batch in enumerate(data(task)):
            callback.on_train_batch_start(trainer, model, batch, index)
            loss = scale * F.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            callback.on_before_backward(trainer, model, loss)
            loss.backward()
            for parameter in model.parameters():
                parameter.grad /= scale
            optimizer.step()
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, model, None, batch, index)
        callback.on_train_end(trainer, model)
    assert_same(model, expected)
