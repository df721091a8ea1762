"""The model registry behind ``create_model`` and ``list_models``."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

from torch import nn

from infssm._registry import Registry
from infssm.models.sizes import build_within_memory

MODELS: Registry[Callable[..., nn.Module]] = Registry("model", group="infssm.models")


def register_model(name: str) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register the decorated function, which builds a model from keyword options, under ``name``."""
    return MODELS.register(name)


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of all registered models that match a shell pattern such as ``"vim*"``."""
    return [name for name in MODELS if fnmatch(name, pattern)]


def describe_model(name: str) -> str:
    """What a registered model is, in a line."""
    return MODELS.describe(name)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    """Build a registered model and note on it how it was built (``save_pretrained`` writes that down)."""
    model = build_within_memory(name, MODELS[name], options)
    model.model_name, model.model_options = name, dict(options)  # type: ignore[assignment]
    return model
