"""Evaluation over many tokens in pieces that fit the cache, without keeping n x n matrices for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infssm.geometry._space import StateSpace

# Elements of one [tokens, n, n] temporary: 1 MiB in float32 stays in a core's cache; devices want larger pieces.
_CPU_ELEMENTS = 2**18
_DEVICE_ELEMENTS = 2**24

TokenFn = Callable[[StateSpace, StateSpace], Tensor]


def per_token(fn: TokenFn) -> TokenFn:
    """Let a distance whose tokens do not see each other take any number of them in little memory.

    ``fn`` maps systems ``[..., n]`` with equal leading dimensions to ``[...]``. Above the cache size it runs piece by
    piece, and the gradient of each piece is taken at once, so that ``[tokens, n]`` is all that waits for the backward
    pass (which then has no second derivative).
    """

    @wraps(fn)
    def evaluate(old: StateSpace, new: StateSpace) -> Tensor:
        lead, n = new.c.shape[:-1], new.a.shape[-1]
        limit = _CPU_ELEMENTS if new.c.device.type == "cpu" else _DEVICE_ELEMENTS
        size = max(1, limit // (n * n))
        if torch.compiler.is_compiling() or lead.numel() <= size:
            return fn(old, new)
        parts: tuple[Tensor | None, ...] = (old.a, old.c, old.b, new.a, new.c, new.b)
        if not torch.is_grad_enabled():  # or the gradients of the pieces would be computed for nothing
            parts = tuple(None if x is None else x.detach() for x in parts)
        flat = (None if x is None else x.reshape(-1, x.shape[-1]) for x in parts)
        value: Tensor = _Pieces.apply(fn, size, *flat)  # type: ignore[no-untyped-call]
        return value.reshape(lead)

    return evaluate


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: TokenFn, size: int, *parts: Tensor | None) -> Tensor:
        needs = [bool(need) for need in ctx.needs_input_grad[2:]]
        split = [None if x is None else torch.split(x.detach(), size) for x in parts]
        results = [_piece(fn, [x and x[i] for x in split], needs) for i in range(len(split[0] or ()))]
        values, grads = zip(*results, strict=True)
        ctx.save_for_backward(*(None if g[0] is None else torch.cat(g) for g in zip(*grads, strict=True)))
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if x is None else x * grad.unsqueeze(-1) for x in ctx.saved_tensors)


def _piece(fn: TokenFn, parts: list[Any], needs: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """Values of one piece and their gradient by each of its tensors."""
    leaves = [x.requires_grad_() if need else x for x, need in zip(parts, needs, strict=True)]
    wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
    with torch.set_grad_enabled(bool(wanted)):
        value = fn(StateSpace(*leaves[:3]), StateSpace(*leaves[3:]))
    if not value.requires_grad:
        return value, [None] * len(leaves)
    found = iter(torch.autograd.grad(value, wanted, torch.ones_like(value), allow_unused=True))
    return value.detach(), [next(found) if need else None for need in needs]
