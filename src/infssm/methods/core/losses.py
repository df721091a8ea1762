"""Losses and state differences that several methods share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm._batch import IGNORED
from infssm.errors import ConfigError
from infssm.methods.core.context import ModelPair
from infssm.methods.core.tasks import BatchLike
from infssm.ssm import StateSpace, soft_normalize


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


def mean_over_states(pair: ModelPair, difference: Callable[[StateSpace, StateSpace], Tensor]) -> Tensor:
    """Mean over tokens (without padding), then over layers and directions, of a difference of two state spaces."""
    means = []
    for old, new in zip(pair.old.states, pair.new.states, strict=True):
        values = difference(old.without_padding(), new.without_padding())
        means.append(values.mean() if values.numel() else values.sum())  # the mean of a batch of padding alone is NaN
    return torch.stack(means).mean()


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
