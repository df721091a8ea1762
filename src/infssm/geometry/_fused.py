"""Where a compiled kernel serves a distance."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from infssm import kernels
from infssm.geometry._registry import DistanceFn
from infssm.geometry._space import StateSpace
from infssm.kernels.backend import choose
from infssm.kernels.distance import CPU_ONLY, Kind


def fused(kind: Kind) -> Callable[[DistanceFn], DistanceFn]:
    """Let the compiled kernel of ``kind`` take the systems it can, and the decorated function all others.

    The result takes raw states with ``soft_normalize=True``.
    """

    def decorate(fn: DistanceFn) -> DistanceFn:
        @wraps(fn)
        def evaluate(old: StateSpace, new: StateSpace, *, soft_normalize: bool = False, **options: Any) -> Tensor:
            if options.get("equality", "token") == "token" and _fits(kind, old, new):
                return kernels.fused_distance(
                    *(old.a, old.c, new.a, new.c), kind=kind, old_b=old.b, new_b=new.b, soft_normalize=soft_normalize
                )
            if soft_normalize:
                old, new = old.soft_normalized(), new.soft_normalized()
            return fn(old, new, **options)

        evaluate.takes_raw = True  # type: ignore[attr-defined]
        return evaluate

    return decorate


def takes_raw(fn: DistanceFn) -> bool:
    """Whether the function soft-normalises by itself."""
    return getattr(fn, "takes_raw", False)


def compiled(*tensors: Tensor) -> bool:
    """Whether compiled or Triton kernels take such tensors: float32, outside of `torch.func` transforms."""
    single = all(x.dtype == torch.float32 for x in tensors)
    return single and choose(None, *tensors) != "reference" and not torch._C._are_functorch_transforms_active()


def _fits(kind: Kind, old: StateSpace, new: StateSpace) -> bool:
    tensors = [old.a, old.c, new.a, new.c]
    if kind in CPU_ONLY and old.a.is_cuda:
        return False
    if kind == "output":
        if old.b is None or new.b is None or old.is_scalar or _needs_grad(old.a, old.c, old.b):
            return False
        tensors += [old.b, new.b]
    return old.c.shape == new.c.shape and old.a.shape == new.a.shape and compiled(*tensors)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
