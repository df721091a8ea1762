"""Adapters to training libraries, each driven by a stand-in that calls the hooks in the library's own order.

Avalanche, Lightning and the Trainer's dependency are not installed here; the stand-ins have the interface the adapters
use. What is checked is what a plain loop over the same data gives: the same losses, weights and method calls.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import attach
from infssm.models import create_model

STEPS = 3


def model_and_method() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = create_model("vim_nano", num_classes=4, img_size=8, patch_size=4, depth=1, embed_dim=16)
    return model, attach(model, "inf-ssm-exact", num_classes=4, num_tasks=2, weight=10.0)


def data(task: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(task)
    draw = [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(STEPS)]
    return [(x, torch.arange(4) % 2 + 2 * task) for x in draw]


def plain_loop() -> dict[str, Tensor]:
    model, method = model_and_method()
    for task in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method.begin_task(task)
        for x, y in data(task):
            loss = F.cross_entropy(model(x), y)
            penalty = method.penalty(x)
            loss = loss + penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            method.after_step()
        method.end_task(task)
    assert penalty > 1e-6  # the adapters below would be equal without one, too
    return model.state_dict()


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return plain_loop()


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")


class Spy:
    """Counts the method's calls and passes them on."""

    def __init__(self, method: Any) -> None:
        self.method = method
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.method, name)

        def call(*args: Any) -> Any:
            self.calls.append(name if name in ("penalty", "after_step") else (name, *args))
            return target(*args)

        return call if callable(target) else target


def calls_of(task: int) -> list[Any]:
    return [("begin_task", task), *(["penalty", "after_step"] * STEPS), ("end_task", task)]


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Put an importable stand-in module ``a.b`` into sys.modules."""
    from importlib.machinery import ModuleSpec

    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        module = ModuleType(full)
        module.__spec__ = ModuleSpec(full, None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, full, module)
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


@pytest.fixture
def plugin_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    from infssm.integrations import avalanche

    install(monkeypatch, "avalanche.core", SupervisedPlugin=type("SupervisedPlugin", (), {}))
    vars(avalanche).pop("MethodPlugin", None)
    yield avalanche.MethodPlugin
    del vars(avalanche)["MethodPlugin"]


def test_avalanche_plugin(plugin_class: Any, expected: dict[str, Tensor]) -> None:
    model, method = model_and_method()
    plugin = plugin_class(Spy(method))
    strategy = SimpleNamespace(model=model)
    for task in range(2):
        strategy.experience = SimpleNamespace(current_experience=task)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plugin.before_training_exp(strategy)
        for strategy.mb_x, y in data(task):
            optimizer.zero_grad()
            strategy.loss = F.cross_entropy(model(strategy.mb_x), y)
            plugin.before_backward(strategy)
            strategy.loss.backward()
            optimizer.step()
            plugin.after_update(strategy)
        plugin.after_training_exp(strategy)
    assert_same(model, expected)
    assert plugin.method.calls == calls_of(0) + calls_of(1)


class LightningTrainer:
    """The hooks of a fit with automatic optimisation, in Lightning's order."""

    def __init__(self, callback: Any, *, accumulate: int = 1, scale: float | None = None) -> None:
        self.callback, self.accumulate_grad_batches, self.global_step = callback, accumulate, 0
        scaler = None if scale is None else SimpleNamespace(get_scale=lambda: scale)
        self.precision_plugin = SimpleNamespace(scaler=scaler)
        self.scale = 1.0 if scale is None else scale

    def fit(self, model: nn.Module, batches: list[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.callback.on_train_start(self, model)
        for index, batch in enumerate(batches):
            self.callback.on_train_batch_start(self, model, batch, index)
            loss = self.scale * F.cross_entropy(model(batch[0]), batch[1]) / self.accumulate_grad_batches
            if index % self.accumulate_grad_batches == 0:
                optimizer.zero_grad()
            self.callback.on_before_backward(self, model, loss)
            loss.backward()
            if (index + 1) % self.accumulate_grad_batches == 0:
                for parameter in model.parameters():
                    parameter.grad /= self.scale
                optimizer.step()
                self.global_step += 1
            self.callback.on_train_batch_end(self, model, None, batch, index)
        self.callback.on_train_end(self, model)


@pytest.fixture
def callback_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    from infssm.integrations import lightning

    install(monkeypatch, "lightning.pytorch", Callback=type("Callback", (), {}))
    vars(lightning).pop("ContinualCallback", None)
    yield lightning.ContinualCallback
    del vars(lightning)["ContinualCallback"]


@pytest.mark.parametrize("scale", [None, 128.0])
def test_lightning_callback(callback_class: Any, expected: dict[str, Tensor], scale: float | None) -> None:
    model, method = model_and_method()
    callback = callback_class(Spy(method))
    for task in range(2):
        assert callback.task == task
        LightningTrainer(callback, scale=scale).fit(model, data(task))
    assert_same(model, expected)
    assert callback.method.calls == calls_of(0) + calls_of(1)


def test_lightning_accumulation_counts_optimiser_steps(callback_class: Any, expected: dict[str, Tensor]) -> None:
    model, method = model_and_method()
    callback = callback_class(Spy(method))
    for task in range(2):
        doubled = [batch for batch in data(task) for _ in range(2)]  # the mean over two equal batches is one batch
        LightningTrainer(callback, accumulate=2).fit(model, doubled)
    assert_same(model, expected)
    assert callback.method.calls.count("after_step") == 2 * STEPS


def test_lightning_checkpoints_carry_the_method(callback_class: Any) -> None:
    model, method = model_and_method()
    callback = callback_class(method)
    LightningTrainer(callback).fit(model, data(0))
    _, other_method = model_and_method()
    other = callback_class(other_method)
    other.load_state_dict(callback.state_dict())
    assert other.task == 1
    x = data(1)[0][0]
    for a, b in zip(other_method.context.old.states(x), method.context.old.states(x), strict=True):
        assert torch.equal(a.a, b.a)


class Trainer:
    """The parts of transformers' Trainer the mixin touches."""

    def __init__(self, model: nn.Module, *, accumulate: int = 1, model_accepts_loss_kwargs: bool = False) -> None:
        self.model, self.callbacks, self.train_dataset = model, [], []
        self.model_accepts_loss_kwargs, self.compute_loss_func = model_accepts_loss_kwargs, None
        self.loss_is_scaled_for_ga = None
        self.current_gradient_accumulation_steps = accumulate

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(inputs["x"])
        items = len(logits) if num_items_in_batch is None else num_items_in_batch
        loss = F.cross_entropy(logits, inputs["labels"], reduction="sum") / items
        return (loss, logits) if return_outputs else loss

    def train(self) -> str:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        every = self.current_gradient_accumulation_steps
        for index, inputs in enumerate(self.train_dataset):
            self.model.train()
            items = every * len(inputs["labels"]) if self.model_accepts_loss_kwargs else None
            loss = self.compute_loss(self.model, inputs, num_items_in_batch=items)
            (loss if self.model_accepts_loss_kwargs else loss / every).backward()
            if (index + 1) % every == 0:
                optimizer.step()
                for callback in self.callbacks:
                    callback.on_optimizer_step(None, None, None)
                optimizer.zero_grad()
        return "trained"


@pytest.mark.parametrize(("accumulate", "scaled"), [(1, False), (2, False), (2, True)])
def test_trainer_mixin(expected: dict[str, Tensor], accumulate: int, scaled: bool) -> None:
    from infssm.data.torchvision import torchvision
    from infssm.integrations.transformers import ContinualTrainerMixin

    torchvision()

    class MyTrainer(ContinualTrainerMixin, Trainer):
        pass

    model, method = model_and_method()
    spy = Spy(method)
    wrapped = SpyInputs(spy)
    trainer = MyTrainer(model, method=wrapped, accumulate=accumulate, model_accepts_loss_kwargs=scaled)
    for task in range(2):
        batches = [{"x": x, "labels": y} for x, y in data(task) for _ in range(accumulate)]
        assert trainer.train_task(task, batches) == "trained"
    assert_same(model, expected)
    assert spy.calls.count("after_step") == 2 * STEPS
    model.eval()
    before = len(spy.calls)
    loss, _ = trainer.compute_loss(model, batches[0], return_outputs=True)
    assert len(spy.calls) == before  # no penalty in evaluation
    assert loss.ndim == 0


class SpyInputs:
    """The images only: this model takes no keyword arguments, as a transformers model would."""

    def __init__(self, spy: Spy) -> None:
        self.spy = spy

    def penalty(self, inputs: Any) -> Tensor:
        assert set(inputs) == {"x", "labels"}
        return self.spy.penalty(inputs["x"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spy, name)


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [("avalanche", "MethodPlugin", "avalanche-lib"), ("lightning", "ContinualCallback", "pip install lightning")],
)
def test_absent_libraries_are_named(module: str, name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.setattr("infssm.integrations._lazy.find_spec", lambda _: None)
    adapter = importlib.import_module(f"infssm.integrations.{module}")
    with pytest.raises(ConfigError, match=hint):
        getattr(adapter, name)
    with pytest.raises(AttributeError):
        _ = adapter.Nothing


def test_timm_builds_our_models() -> None:
    from infssm.data.torchvision import timm
    from infssm.integrations.timm import register

    added = register()
    assert register() == []
    name = "vim_nano"
    assert name in added or timm().is_model(name)
    model = timm().create_model(name, num_classes=3, img_size=8, patch_size=4, depth=1, embed_dim=16)
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 3)
