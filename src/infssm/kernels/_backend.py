"""Which implementation serves a call: `cpu` (the compiled module) or `reference` (plain PyTorch)."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from infssm.errors import ConfigError

BACKENDS = ("reference", "cpu")

# Narrower floats are widened to float32 at the door, so autocast does not push a CPU model onto the slow path.
_NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def _load_native() -> ModuleType | None:
    try:
        return importlib.import_module("infssm.kernels._native")
    except ImportError:
        return None


# The compiled module, or None where it was not built or cannot be loaded.
NATIVE = _load_native()


def use_native(backend: str | None, *tensors: Tensor | None) -> bool:
    """Whether the compiled kernels serve this call: `backend` if given (checked), else where they can."""
    if backend == "reference":
        return False
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}; None picks the fastest")
    obstacle = _obstacle(tensors)
    if obstacle is not None and backend == "cpu":
        raise ConfigError(f"backend='cpu' cannot serve this call: {obstacle}; use backend=None or 'reference'")
    # A tensor without elements has no address to hand over; the reference returns its empty result.
    return obstacle is None and all(tensor is None or tensor.numel() > 0 for tensor in tensors)


def single(tensor: Tensor) -> Tensor:
    """The tensor in float32, what the compiled kernels read."""
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def maybe_single(tensor: Tensor | None) -> Tensor | None:
    """`single`, or None."""
    return None if tensor is None else single(tensor)


def _obstacle(tensors: tuple[Tensor | None, ...]) -> str | None:
    if NATIVE is None:
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
    report: dict[str, Any] = {
        "default": "reference" if NATIVE is None else "cpu",
        "native": NATIVE is not None,
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
    }
    if NATIVE is not None:
        report["isa"] = NATIVE.isa()
        report["isas"] = list(NATIVE.isas())
        report["module"] = NATIVE.__file__
    return report
