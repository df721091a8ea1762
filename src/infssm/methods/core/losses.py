"""The one training step, and the losses and state differences that several methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm._batch import IGNORED
from infssm.errors import ConfigError
from infssm.methods.core.context import ModelPair
from infssm.methods.core.tasks import BatchLike
from infssm.ssm import StateSpace, soft_normalize

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
        optimizer: optimizer of the parameters.
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


def data_loss(outputs: Tensor, batch: BatchLike, columns: slice) -> dict[str, Tensor]:
    """The loss of a batch under its name: ``ce``, see :func:`cross_entropy`; ``mse`` where targets are numbers."""
    if batch.y.is_floating_point():
        return {"mse": F.mse_loss(outputs[:, 0], batch.y)}
    return {"ce": cross_entropy(outputs, batch, columns)}


def cross_entropy(logits: Tensor, batch: BatchLike, columns: slice) -> Tensor:
    """Mean cross-entropy over some columns of ``logits: [b, K]``, or of every token of ``logits: [b, tokens, K]``.

    Soft targets are cut to the columns and renormalised to sum to one; hard labels must lie inside them. For language,
    labels are the next tokens ``[b, tokens]``, and the columns are the whole vocabulary.
    """
    if logits.ndim == 3:
        return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED)
    start = columns.start or 0
    if batch.soft is None:
        return F.cross_entropy(logits[:, columns], batch.y - start)
    soft = batch.soft[:, columns]
    return F.cross_entropy(logits[:, columns], soft / soft.sum(dim=1, keepdim=True))


_AT_ONCE = 2**20
"""Elements of all layers' states together up to which they are compared in one call: a call of its own for each layer
costs more than small states take."""


def mean_over_states(
    pair: ModelPair, difference: Callable[[StateSpace, StateSpace], Tensor], *, at_once: bool = True
) -> Tensor:
    """Mean over tokens (without padding), then over layers and directions, of a difference of two state spaces.

    ``at_once``: the difference has one value per leading index, whatever the others are, so layers may be stacked.
    """
    old, new = ([space.without_padding() for space in states.states] for states in (pair.old, pair.new))
    shapes = {(space.a.shape, space.c.shape, space.b is None) for space in (*old, *new)}
    if at_once and len(old) > 1 and len(shapes) == 1 and sum(space.c.numel() for space in new) <= _AT_ONCE:
        values = difference(_stacked(old), _stacked(new)).unbind()
    else:
        values = tuple(map(difference, old, new))
    # The mean of a batch that is all padding would be NaN.
    return torch.stack([value.mean() if value.numel() else value.sum() for value in values]).mean()


def _stacked(spaces: Sequence[StateSpace]) -> StateSpace:
    a, c, b = zip(*((space.a, space.c, space.b) for space in spaces), strict=True)
    return StateSpace(torch.stack(a), torch.stack(c), None if b[0] is None else torch.stack(b))


def squared_difference(which: str) -> Callable[[StateSpace, StateSpace], Tensor]:
    """Mean squared difference over the n states of soft-normalised ``a``, ``b`` or ``c``: ``[...]``."""

    def difference(old: StateSpace, new: StateSpace) -> Tensor:
        x: Tensor = getattr(old, which)
        y: Tensor = getattr(new, which)
        if not x.is_complex():
            x, y = soft_normalize(x), soft_normalize(y)
        return (x - y).abs().square().mean(dim=-1)

    return difference


def b_difference(pair: ModelPair, *, method: str, without: str) -> Tensor:
    """Mean squared difference of B; raises for layers without B, and recommends the method ``without`` it."""
    if any(space.b is None for space in pair.new.states):
        raise ConfigError(f"{method} needs the input matrix B, which this model's layers do not provide; use {without}")
    return mean_over_states(pair, squared_difference("b"))
