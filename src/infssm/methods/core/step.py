"""The one training step: forward, backward, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Mapping[str, Tensor])


def total_loss(terms: Mapping[str, Tensor]) -> Tensor:
    """The sum of all loss terms, a scalar in float32 or wider: in a lower precision small terms would be lost."""
    return torch.stack([term.to(torch.promote_types(term.dtype, torch.float32)) for term in terms.values()]).sum()


def train_step(
    loss: Callable[[], T],
    optimizer: torch.optim.Optimizer,
    *,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    backward: Callable[[Tensor], object] = Tensor.backward,
    before_update: Callable[[Tensor, T], object] | None = None,
    after_update: Callable[[], object] | None = None,
) -> T:
    """Take one step down the sum of ``loss()``'s terms, and return them.

    Args:
        loss: the forward; run inside ``precision``, the context that decides its number format.
        optimizer: of the parameters to move.
        backward: fills their gradients.
        before_update: gets the total and the terms while gradients can still be changed or refused.
        after_update: called after ``optimizer.step()`` (``Method.after_step``); it must not rely on ``.grad``, which a
            user's loop may have cleared by then.
    """
    with precision():
        terms = loss()
    total = total_loss(terms)
    backward(total)
    if before_update is not None:
        before_update(total, terms)
    optimizer.step()
    if after_update is not None:
        after_update()
    optimizer.zero_grad(set_to_none=True)
    return terms
