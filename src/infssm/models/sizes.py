"""Models that cannot be built, or would not fit into memory, are refused in words before memory is taken."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from infssm._memory import describe_bytes, memory_here
from infssm._registry import shorten
from infssm.errors import ConfigError

_LARGEST = 10**6
"""No width, depth or vocabulary of a model is larger."""
_CALLS = 20_000
"""Tensors a constructor may make: hundreds of layers."""
_SMALL = 2**30
"""Bytes up to which a model is simply built; a larger one is counted first."""
_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.Tensor.repeat}
_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, MemoryError)
"""What constructors raise for options they cannot use."""


class _TooLargeError(Exception):
    """Stops a constructor whose tensors are more than ``size`` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class _Counting(TorchFunctionMode):
    """Adds up the bytes of the tensors a constructor makes, each before it is made."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most, self.size, self.calls = most, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKERS:
            self.calls += 1
            self.size += 4 * _elements(args)
            if self.size > self.most:
                raise _TooLargeError(self.size)
            if self.calls > _CALLS:
                raise ConfigError(f"it has more than {_CALLS:,} tensors: lower its depth")
        return func(*args, **(kwargs or {}))


def _elements(args: tuple[Any, ...]) -> int:
    """Elements of a tensor made by ``torch.empty(2, 3)``, ``torch.empty((2, 3))`` or ``tensor.repeat(2, 3)``."""
    first, *rest = args or (1,)
    if isinstance(first, torch.Tensor):
        return first.numel() * _elements(tuple(rest))
    sizes = first if isinstance(first, list | tuple) else args
    return math.prod(size for size in sizes if isinstance(size, int))


def check_sizes(name: str, options: Mapping[str, Any]) -> None:
    """Raise for sizes that no model can have: zero, negative or absurd ones."""
    for key, value in options.items():
        least = 0 if key == "num_classes" else 1  # zero classes: a model without a head
        for size in value if isinstance(value, list | tuple) else [value]:
            if isinstance(size, int) and not isinstance(size, bool) and not least <= size <= _LARGEST:
                raise ConfigError(f"model {name!r}: {key}={size} is no size; choose one from {least} to {_LARGEST:,}")


def build_within_memory(name: str, factory: Callable[..., nn.Module], options: Mapping[str, Any]) -> nn.Module:
    """Build a model, unless its options do not fit the constructor or its weights not into memory."""
    check_sizes(name, options)
    available = math.inf if torch.get_default_device().type == "meta" else memory_here() or math.inf
    try:
        model = _construct(name, factory, options, min(available, _SMALL) if available < math.inf else available)
    except _TooLargeError as first:
        size = first.size
        if size <= available:
            size = _count(name, factory, options, available)
        if size > available:
            raise ConfigError(
                f"model {name!r} with {_shown(options)} needs {describe_bytes(size)} or more for its weights alone, "
                f"and this machine has {describe_bytes(available)}: make it smaller"
            ) from None
        model = _construct(name, factory, options, math.inf)
    if empty := [key for key, parameter in model.named_parameters() if parameter.numel() == 0]:
        raise ConfigError(f"model {name!r} with {_shown(options)} has weights without elements ({empty[0]}): widen it")
    return model


def _count(name: str, factory: Callable[..., nn.Module], options: Mapping[str, Any], available: float) -> int:
    """Bytes of the model's tensors, or of the first ones that are more than ``available``; takes no memory."""
    state = torch.get_rng_state()
    try:
        with torch.device("meta"):
            return _bytes(_construct(name, factory, options, available))
    except _TooLargeError as error:
        return error.size
    except ConfigError:  # a constructor that reads values can only be run for real
        return 0
    finally:
        torch.set_rng_state(state)


def _shown(options: Mapping[str, Any]) -> str:
    return shorten(str(dict(options)), 200)


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _construct(name: str, factory: Callable[..., nn.Module], options: Mapping[str, Any], most: float) -> nn.Module:
    try:
        with _Counting(most), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # said in words afterwards
            return factory(**options)
    except ConfigError as error:
        raise ConfigError(f"model {name!r} cannot be built with {_shown(options)}: {error}") from error
    except _FAILURES as error:
        reason = shorten(str(error), 200)
        raise ConfigError(f"model {name!r} cannot be built with {_shown(options)}: {reason}") from error
