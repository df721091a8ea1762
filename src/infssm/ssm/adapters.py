"""Adapters of the peft library: which are active in which layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def active_adapters(module: nn.Module) -> dict[str, list[str]]:
    """Names of the active adapters by layer, of the layers that have any."""
    return {name: list(layer.active_adapters) for name, layer in _layers(module)}


def merged_adapters(module: nn.Module) -> list[tuple[Any, list[str]]]:
    """The layers with adapters, and which of these are merged into the layer's own weight."""
    layers = (layer for _, layer in _layers(module) if hasattr(layer, "merged_adapters"))
    return [(layer, list(layer.merged_adapters)) for layer in layers]


def set_active_adapters(module: nn.Module, active: Mapping[str, Sequence[str]]) -> None:
    """Activate adapters by layer, frozen."""
    for name, layer in _layers(module):
        if name in active:
            layer.set_adapter(list(active[name]), inference_mode=True)


def _layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Layers that peft put around others. Read from their class: peft's models answer for what they hold."""
    return [(name, layer) for name, layer in module.named_modules() if hasattr(type(layer), "adapter_layer_names")]
