"""Evaluation over many systems in pieces that fit the cache, without keeping n x n matrices for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infssm.ops.distances._pair import Pair

# Elements of one [n, n, systems] temporary: 1 MiB in float64 stays in a core's cache; devices want larger pieces.
CPU_ELEMENTS = 2**17
DEVICE_ELEMENTS = 2**24

PairFn = Callable[[Pair], Tensor]


def in_pieces(fn: PairFn) -> PairFn:
    """Let a formula whose systems do not see each other take any number of them in little memory.

    ``fn`` maps a pair with tensors ``[..., n]`` to ``[...]``, with temporaries of n x n elements for each system.
    """

    @wraps(fn)
    def evaluate(pair: Pair) -> Tensor:
        def formula(*tensors: Tensor | None) -> Tensor:
            return fn(Pair(*tensors, soft=pair.soft))  # type: ignore[arg-type]

        return piecewise(formula, pair.tensors, pair.old_c.shape[:-1], pair.order**2)

    return evaluate


def piecewise(fn: Callable[..., Tensor], tensors: Sequence[Tensor | None], lead: torch.Size, elements: int) -> Tensor:
    """``fn(*tensors)`` of tensors ``[*lead, ...]``, which needs temporaries of so many elements for each system.

    Above the cache size it runs piece by piece, and the gradient of each piece is taken at once, so that no more than
    the tensors' own size waits for the backward pass (which then has no second derivative).
    """
    device = next(x.device.type for x in tensors if x is not None)
    size = max(1, (CPU_ELEMENTS if device == "cpu" else DEVICE_ELEMENTS) // elements)
    if torch.compiler.is_compiling() or lead.numel() <= size:
        return fn(*tensors)
    flat = [None if x is None else x.reshape(-1, *x.shape[len(lead) :]) for x in tensors]
    if not torch.is_grad_enabled():  # or the gradients of the pieces would be computed for nothing
        flat = [None if x is None else x.detach() for x in flat]
    value: Tensor = Pieces.apply(fn, size, *flat)  # type: ignore[no-untyped-call]
    return value.reshape(lead)


class Pieces(torch.autograd.Function):
    """``fn(*tensors) -> [systems]``, the first dimension of all tensors that are not None, ``size`` at a time."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], size: int, *tensors: Tensor | None) -> Tensor:
        """Values, and with them the slopes that the backward pass needs."""
        needs = [bool(need) for need in ctx.needs_input_grad[2:]]
        split = [None if x is None else torch.split(x.detach(), size) for x in tensors]
        results = []
        for i in range(len(split[0] or ())):
            parts: list[Any] = [x and x[i] for x in split]
            leaves = [x.requires_grad_() if need else x for x, need in zip(parts, needs, strict=True)]
            results.append(value_and_slopes(fn, leaves, needs))
        values, grads = zip(*results, strict=True)
        ctx.save_for_backward(*(None if g[0] is None else torch.cat(g) for g in zip(*grads, strict=True)))
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Slopes times the gradient of each value."""
        slopes = (
            None if x is None else (x * grad.view(-1, *[1] * (x.ndim - 1))).to(x.dtype) for x in ctx.saved_tensors
        )
        return None, None, *slopes


def value_and_slopes(
    fn: Callable[..., Tensor], tensors: Sequence[Tensor | None], needs: list[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Values ``[systems]`` and, of the leaves that need one, the derivative of each value by its own systems."""
    wanted = [x for x, need in zip(tensors, needs, strict=True) if x is not None and need]
    with torch.set_grad_enabled(bool(wanted)):
        value = fn(*tensors)
    if not value.requires_grad:
        return value, [None] * len(needs)
    found = iter(torch.autograd.grad(value, wanted, torch.ones_like(value), allow_unused=True))
    return value.detach(), [next(found) if need else None for need in needs]
