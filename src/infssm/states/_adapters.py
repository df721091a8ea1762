"""Adapters of the peft library: which are active in which layer, and the weights that they and their layer make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def active_adapters(module: nn.Module) -> dict[str, list[str]]:
    """Names of the active adapters by layer, of the layers that have any."""
    return {name: list(layer.active_adapters) for name, layer in _layers(module)}


def set_active_adapters(module: nn.Module, active: Mapping[str, Sequence[str]]) -> None:
    """Activate adapters by layer, frozen."""
    for name, layer in _layers(module):
        if name in active:
            layer.set_adapter(list(active[name]), inference_mode=True)


def effective_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters by name, one at a time; those of a layer with low-rank adapters as their sum.

    Names are those of the module without adapters. Adapters that are no sum stay out.
    """
    inside = tuple(f"{name}." for name, _ in _layers(module))
    for name, parameter in module.named_parameters():
        if not name.startswith(inside):
            yield name, parameter
    for name, layer in _layers(module):
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else None
        for leaf, parameter in () if base is None else base.named_parameters():
            yield f"{name}.{leaf}", _sum(layer, parameter) if leaf == "weight" else parameter


def _sum(layer: Any, weight: Tensor) -> Tensor:
    if layer.merged or layer.disable_adapters or not hasattr(layer, "get_delta_weight"):
        return weight
    for name in layer.active_adapters:
        if name in getattr(layer, layer.adapter_layer_names[0]):
            weight = weight + layer.get_delta_weight(name)
    return weight


def _layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Layers that peft put around others. Read from their class: peft's models answer for what they hold."""
    return [(name, layer) for name, layer in module.named_modules() if hasattr(type(layer), "adapter_layer_names")]
