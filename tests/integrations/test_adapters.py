"""The Avalanche plugin, driven by a stand-in that calls the hooks in Avalanche's order; absent libraries; timm.

Avalanche brings dozens of packages of its own and is not installed here; the stand-in has what the plugin uses of it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from tests.integrations.loops import Spy, assert_same, calls_of, data, model_and_method


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
    install(monkeypatch, "avalanche.core", SupervisedPlugin=type("SupervisedPlugin", (), {}))
    monkeypatch.delitem(sys.modules, "infssm.integrations.avalanche", raising=False)
    yield importlib.import_module("infssm.integrations.avalanche").MethodPlugin
    del sys.modules["infssm.integrations.avalanche"]


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


@pytest.mark.parametrize(("module", "hint"), [("avalanche", "avalanche-lib"), ("lightning", "pip install lightning")])
def test_absent_libraries_are_named(module: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infssm._optional.find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, f"infssm.integrations.{module}", raising=False)
    with pytest.raises(ConfigError, match=hint):
        importlib.import_module(f"infssm.integrations.{module}")


def test_timm_builds_our_models() -> None:
    from infssm._torchvision import timm
    from infssm.integrations.timm import register

    added = register()
    assert register() == []
    name = "vim_nano"
    assert name in added or timm().is_model(name)
    model = timm().create_model(name, num_classes=3, img_size=8, patch_size=4, depth=1, embed_dim=16)
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 3)
