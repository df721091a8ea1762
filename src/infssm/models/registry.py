"""The model registry behind ``create_model`` and ``list_models``.

Models that cannot be built, or whose weights would not fit into memory, are refused before memory is used for them.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infssm._machine import describe_bytes, memory_here
from infssm._registry import Registry, shorten
from infssm.errors import ConfigError

MODELS: Registry[Callable[..., nn.Module]] = Registry("model", group="infssm.models")


def register_model(name: str) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register the decorated function, which builds a model from keyword options, under ``name``."""
    return MODELS.register(name)


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of all registered models that match a shell pattern such as ``"vim*"``."""
    return [name for name in MODELS if fnmatch(name, pattern)]


def describe_model(name: str) -> str:
    """A one-line description of a registered model."""
    return MODELS.describe(name)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    """Build a registered model and note on it how it was built (``save_pretrained`` writes that down)."""
    model = build_within_memory(name, MODELS[name], options)
    model.model_name, model.model_options = name, dict(options)  # type: ignore[assignment]
    return model


_MAX_SIZE = 10**6
"""No width, depth or vocabulary of a model is larger."""
_MAX_PARAMETERS = 20_000
"""Tensors of a model with hundreds of layers; more mean an absurd depth, which would take minutes to build."""
_SMALL = 2**30
"""Bytes up to which a model is simply built; a larger one is first built on the meta device and counted."""

_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, ConfigError)
"""Exceptions of constructors for options they cannot use."""


class _TooLargeError(Exception):
    """Stops a constructor whose parameters have more than ``size`` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@contextmanager
def _limit_parameters(most: float) -> Iterator[None]:
    """Stop constructors in this block once their parameters have more than ``most`` bytes.

    Layers register a parameter before they fill it, so the pages of the parameter that is too much are never touched.
    """
    thread, size, count = threading.get_ident(), 0, 0

    def add(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal size, count
        if parameter is None or threading.get_ident() != thread:  # the hook is called for modules of all threads
            return
        size, count = size + parameter.numel() * parameter.element_size(), count + 1
        if size > most:
            raise _TooLargeError(size)
        if count > _MAX_PARAMETERS:
            raise ConfigError(f"it has more than {_MAX_PARAMETERS:,} tensors: lower its depth")

    handle = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        handle.remove()


def build_within_memory(name: str, factory: Callable[..., nn.Module], options: Mapping[str, Any]) -> nn.Module:
    """Build a model; ConfigError if its constructor does not accept the options or its weights do not fit into memory.

    Sizes that no model can have (zero, negative or absurd ones) are refused before the constructor runs.
    """
    shown = shorten(str(dict(options)), 200)
    for key, value in options.items():
        least = 0 if key == "num_classes" else 1  # zero classes: a model without a head
        for size in value if isinstance(value, list | tuple) else [value]:
            if isinstance(size, int) and not isinstance(size, bool) and not least <= size <= _MAX_SIZE:
                raise ConfigError(f"model {name!r}: {key}={size} must be a size from {least} to {_MAX_SIZE:,}")

    def construct(most: float) -> nn.Module:
        try:
            with _limit_parameters(most), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # refused below, in words
                return factory(**options)
        except _FAILURES as error:
            if "can't allocate memory" in str(error) and most < math.inf:
                raise _TooLargeError(0) from None
            reason = str(error) if isinstance(error, ConfigError) else shorten(str(error), 200)
            raise ConfigError(f"model {name!r} cannot be built with {shown}: {reason}") from error

    try:
        model = construct(math.inf if torch.get_default_device().type == "meta" else _SMALL)
    except _TooLargeError:
        available, state, needed = memory_here() or math.inf, torch.get_rng_state(), 0
        try:
            with torch.device("meta"):
                construct(available)
        except _TooLargeError as error:
            needed = error.size
        except ConfigError:  # a constructor that reads values cannot run on the meta device
            pass
        finally:
            torch.set_rng_state(state)
        if needed:
            raise ConfigError(
                f"model {name!r} with {shown} needs {describe_bytes(needed)} or more for its weights, and this "
                f"machine has {describe_bytes(available)}: make it smaller"
            ) from None
        model = construct(math.inf)
    if empty := [key for key, parameter in model.named_parameters() if parameter.numel() == 0]:
        raise ConfigError(f"model {name!r} with {shown} has weights without elements ({empty[0]}): widen it")
    return model
