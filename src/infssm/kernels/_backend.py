"""Which implementation serves a call: `cpu` (the compiled module) or `reference` (plain PyTorch)."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from infssm.errors import ConfigError

BACKENDS = ("reference", "cpu")

# Narrower floats are widened to float32 at the door, so autocast does not push a CPU model onto the slow path.
_NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@cache
def native_module() -> ModuleType | None:
    """The compiled module, or None where it was not built or cannot be loaded."""
    try:
        return importlib.import_module("infssm.kernels._native")
    except ImportError:
        return None


def pick_backend(backend: str | None, *tensors: Tensor | None) -> str:
    """The backend that serves these tensors: `backend` if given (checked), else the fastest that can."""
    if backend == "reference":
        return backend
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}; None picks the fastest")
    obstacle = _obstacle(tensors)
    if obstacle is None:
        return "cpu"
    if backend == "cpu":
        raise ConfigError(f"backend='cpu' cannot serve this call: {obstacle}; use backend=None or 'reference'")
    return "reference"


def _obstacle(tensors: tuple[Tensor | None, ...]) -> str | None:
    if native_module() is None:
        return "infssm.kernels._native was not built (reinstall with a C++17 compiler)"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device.type != "cpu":
            return f"a tensor is on {tensor.device}"
        if tensor.dtype not in _NATIVE_DTYPES:
            return f"a tensor is {tensor.dtype}, the compiled kernels compute in float32"
    return None


def backend_report() -> dict[str, Any]:
    """What was found and which backend `backend=None` will run for float32 CPU tensors."""
    native = native_module()
    report: dict[str, Any] = {
        "default": "reference" if native is None else "cpu",
        "native": native is not None,
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
    }
    if native is not None:
        report["isa"] = native.isa()
        report["isas"] = list(native.isas())
        report["module"] = native.__file__
    return report
