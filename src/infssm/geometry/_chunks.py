"""Evaluation over many tokens in pieces that fit the cache, without keeping n x n matrices for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infssm.geometry._space import StateSpace

# Elements of one [tokens, n, n] temporary: 1 MiB in float32 stays in a core's cache; devices want larger pieces.
_CPU_ELEMENTS = 2**18
_DEVICE_ELEMENTS = 2**24


def in_chunks(fn: Callable[[StateSpace, StateSpace], Tensor], old: StateSpace, new: StateSpace) -> Tensor:
    """``fn(old, new)`` for systems with equal leading dimensions ``[...]``, evaluated piece by piece."""
    lead, n = new.c.shape[:-1], new.n
    limit = _CPU_ELEMENTS if new.c.device.type == "cpu" else _DEVICE_ELEMENTS
    tokens = max(1, limit // (n * n))
    if torch.compiler.is_compiling() or lead.numel() <= tokens:
        return fn(old, new)
    old, new = (space.map(lambda x: x.reshape(-1, x.shape[-1])) for space in (old, new))
    pieces = zip(_split(old, tokens), _split(new, tokens), strict=True)
    return torch.cat([_evaluate(fn, x, y) for x, y in pieces]).reshape(lead)


def _evaluate(fn: Callable[[StateSpace, StateSpace], Tensor], old: StateSpace, new: StateSpace) -> Tensor:
    """One piece; its temporaries are computed again in the backward pass."""
    if not torch.is_grad_enabled():
        return fn(old, new)
    value: Tensor = checkpoint(
        lambda oa, oc, ob, na, nc, nb: fn(StateSpace(oa, oc, ob), StateSpace(na, nc, nb)),
        *(old.a, old.c, old.b, new.a, new.c, new.b),
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return value


def _split(space: StateSpace, tokens: int) -> list[StateSpace]:
    a, c = torch.split(space.a, tokens), torch.split(space.c, tokens)
    b = [None] * len(a) if space.b is None else torch.split(space.b, tokens)
    return [StateSpace(*piece) for piece in zip(a, c, b, strict=True)]
