"""A batch of training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

IGNORED = -100
"""Target of a token that is not predicted; cross-entropy ignores it."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples and targets of one step; ``x, y = batch`` unpacks the first two.

    Attributes:
        x: images float32 [n, channels, height, width], augmented and mixed; or sequences float32 [n, time, width], or
            tokens int64 [n, time], padded with zeros.
        y: int64 [n] stream labels; of language the next token of every step, int64 [n, time], see :func:`next_tokens`;
            of regression the numbers to predict, float32 [n].
        soft: float32 [n, classes] soft targets, where mixing or label smoothing is on.
        raw: uint8 [n, channels, height, width] before augmentation, where asked for.
        index: int64 [n] data set indices.
        mask: bool [n, time], True where a sequence has a step and False where it is padded; None for images.
    """

    x: Tensor
    y: Tensor
    soft: Tensor | None = None
    raw: Tensor | None = None
    index: Tensor | None = None
    mask: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.y))

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> Batch:
        """Model input and targets on ``device``; raw images and indices stay where they are."""
        soft, mask = (None if part is None else part.to(device) for part in (self.soft, self.mask))
        return replace(self, x=self.x.to(device), y=self.y.to(device), soft=soft, mask=mask)


def inputs_of(x: Tensor, mask: Tensor | None) -> Tensor | Mapping[str, Tensor]:
    """``x: [n, ...]``, or the keyword arguments ``x`` and ``mask: [n, time]`` where the mask leaves steps out."""
    return x if mask is None or bool(mask.all()) else {"x": x, "mask": mask}


def model_input(batch: Any, device: torch.device | None = None) -> Tensor | Mapping[str, Any]:
    """The model input of a :class:`Batch`, or another object with ``x`` and perhaps ``mask``.

    ``device``: where to put it; None leaves it where it is.
    """
    x = inputs_of(batch.x, getattr(batch, "mask", None))
    if device is None:
        return x
    return x.to(device) if isinstance(x, Tensor) else {key: value.to(device) for key, value in x.items()}


X = TypeVar("X", Tensor, Mapping[str, Tensor], Tensor | Mapping[str, Tensor])


def moved_to(model: nn.Module, x: X) -> X:
    """Model input on the model's device, floating-point values in the type of its parameters."""
    like = next(model.parameters())
    if isinstance(x, Mapping):
        return {key: moved_to(model, value) for key, value in x.items()}
    return x.to(like.device, like.dtype if x.is_floating_point() else None)


def run_model(model: Callable[..., Any], x: Tensor | Mapping[str, Any], **kwargs: Any) -> Any:
    """Call a model with its input: ``model(x)``, or ``model(**x)`` where that is a mapping of keyword arguments."""
    return model(**x, **kwargs) if isinstance(x, Mapping) else model(x, **kwargs)


def next_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """The targets of a language model at every step: int64 [n, time], ``IGNORED`` after the last token.

    Args:
        x: int64 [n, time] tokens.
        mask: bool [n, time], True where there is a token.
    """
    targets = torch.full_like(x, IGNORED)
    targets[:, :-1] = x[:, 1:].masked_fill(~mask[:, 1:], IGNORED)
    return targets
