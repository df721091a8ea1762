"""From the backend of a call to its operators."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from infssm.kernels import _ops
from infssm.kernels._triton import distance as _triton
from infssm.kernels.backend import choose

_OPERATORS = {"cpu": _ops, "triton": _triton}


def operators(backend: str | None, *tensors: Tensor | None) -> ModuleType | None:
    """The package whose operators serve this call; None leaves it to the reference."""
    return _OPERATORS.get(choose(backend, *tensors))
