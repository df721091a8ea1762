"""Scores of a model on a task: accuracy of classes, bits of language, errors of regression."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from infssm._batch import IGNORED
from infssm.data import Batch, Dataset, Task, TaskStream, Tokens
from infssm.data.loader import Part
from infssm.learner.metrics import ACCURACY, BITS_PER_BYTE, BITS_PER_TOKEN, RMSE, Quantity


@dataclass(frozen=True)
class Score(ABC):
    """Score of a model on one part of a task: :meth:`of` makes it from the sum of the batches' :meth:`counts`."""

    size: ClassVar[int]
    """Length of :meth:`counts`."""
    unit: ClassVar[Quantity]
    has_classes: ClassVar[bool] = False
    """Whether samples have classes, which can be mistaken for each other."""

    @staticmethod
    @abstractmethod
    def counts(logits: Tensor, batch: Batch, task: Task, part: Part, seen: int) -> Tensor:
        """Sums over a batch of a part of a task, float64 [size]; the first ``seen`` columns of the logits compete."""

    @classmethod
    @abstractmethod
    def of(cls, counts: Sequence[float]) -> Score:
        """The score from the counts summed over all batches and processes; NaN without samples."""

    @classmethod
    def quantity(cls, stream: TaskStream) -> Quantity:  # noqa: ARG003 - bits depend on what is known of the text
        """What the cells of a stream's matrix are."""
        return cls.unit

    @staticmethod
    @abstractmethod
    def guess(stream: TaskStream, part: Part) -> list[float]:
        """The :attr:`value` that guessing reaches on a part of each task."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The number that enters the matrix, in the unit of :meth:`quantity`."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of images, bytes, tokens or samples that the score is a mean over."""


@dataclass(frozen=True)
class Accuracy(Score):
    """Fractions of ``images`` that are right: among all classes seen, and inside the image's own task."""

    class_incremental: float
    task_incremental: float
    images: int

    size = 3
    unit = ACCURACY
    has_classes = True

    @staticmethod
    def counts(logits: Tensor, batch: Batch, task: Task, part: Part, seen: int) -> Tensor:  # noqa: ARG004
        """Right answers, right answers among the task's own classes, images."""
        y, classes = batch.y, task.classes
        inside = logits[:, classes.start : classes.stop].argmax(1) + classes.start
        right = logits[:, :seen].argmax(1) == y
        return torch.stack([right.sum(), (inside == y).sum(), y.new_tensor(len(y))]).double()

    @classmethod
    def of(cls, counts: Sequence[float]) -> Accuracy:
        """Fractions."""
        right, inside, images = counts
        return cls(right / images, inside / images, int(images)) if images else cls(math.nan, math.nan, 0)

    @staticmethod
    def guess(stream: TaskStream, part: Part) -> list[float]:  # noqa: ARG004 - the same for all
        """A class drawn uniformly."""
        return [1 / stream.num_classes] * len(stream)

    @property
    def value(self) -> float:
        """The class-incremental accuracy."""
        return self.class_incremental

    @property
    def count(self) -> int:
        """Images."""
        return self.images

    def __str__(self) -> str:
        values = f"{100 * self.class_incremental:6.2f} %   inside the task {100 * self.task_incremental:6.2f} %"
        return f"{values}   ({self.images} images)"


@dataclass(frozen=True)
class Bits(Score):
    """How many bits a language model needs for held-out text.

    Attributes:
        bits_per_byte: mean over the bytes of the text, which different tokenizers can be compared by; NaN where the
            bytes behind the tokens are unknown.
        bits_per_token: mean over the predicted tokens. Where bytes are the tokens, both are the same.
        perplexity: ``2 ** bits_per_token``.
        tokens: predicted tokens.
        bytes: bytes of text behind those tokens; 0 where they are unknown.
    """

    bits_per_byte: float
    bits_per_token: float
    perplexity: float
    tokens: int
    bytes: int

    size = 3

    @staticmethod
    def counts(logits: Tensor, batch: Batch, task: Task, part: Part, seen: int) -> Tensor:  # noqa: ARG004 - any token can follow
        """Sum of bits, tokens, bytes."""
        y = batch.y.flatten()
        nats = F.cross_entropy(logits.float().flatten(0, 1), y, ignore_index=IGNORED, reduction="none").double().sum()
        known, text = _text_bytes(getattr(task, part).dataset), 0
        if known is not None and batch.index is not None:
            text = int(known[batch.index.numpy()].sum())
        return torch.stack([nats / math.log(2), (y != IGNORED).sum().double(), nats.new_tensor(text)])

    @classmethod
    def of(cls, counts: Sequence[float]) -> Bits:
        """Means."""
        bits, tokens, text = counts
        if not tokens:
            return cls(math.nan, math.nan, math.nan, 0, 0)
        mean = bits / tokens
        per_byte = bits / text if text else math.nan
        return cls(per_byte, mean, 2**mean if mean < 1000 else math.inf, int(tokens), int(text))

    @classmethod
    def quantity(cls, stream: TaskStream) -> Quantity:
        """Bits per byte, which different tokenizers can be compared by; per token where the bytes are unknown."""
        return BITS_PER_TOKEN if _text_bytes(stream.dataset) is None else BITS_PER_BYTE

    @staticmethod
    def guess(stream: TaskStream, part: Part) -> list[float]:
        """A token drawn uniformly from the vocabulary."""
        text_bytes, bits = _text_bytes(stream.dataset), math.log2(stream.num_classes)
        if text_bytes is None:
            return [bits] * len(stream)
        predicted = stream.dataset.sequences.lengths - 1
        indices = [getattr(task, part).indices for task in stream]
        return [bits * (float(predicted[mine].sum()) / max(1, int(text_bytes[mine].sum()))) for mine in indices]

    @property
    def value(self) -> float:
        """Bits per byte, or per token."""
        return self.bits_per_byte if self.bytes else self.bits_per_token

    @property
    def count(self) -> int:
        """Bytes, or tokens."""
        return self.bytes or self.tokens

    def __str__(self) -> str:
        per_byte = f"{self.bits_per_byte:.3f} bits per byte, " if self.bytes else ""
        counts = f"{self.tokens:,} tokens" + (f", {self.bytes:,} bytes" if self.bytes else "")
        return f"{per_byte}{self.bits_per_token:.3f} bits per token, perplexity {self.perplexity:.2f}   ({counts})"


@dataclass(frozen=True)
class Errors(Score):
    """How far predicted numbers are from their targets.

    Attributes:
        rmse: root of the mean squared error.
        r2: share of the targets' variance that is explained, ``1 - mean squared error / variance``; 1 is perfect, 0 is
            the mean of the targets, less is worse than that. NaN where the targets do not vary.
        samples: what it was measured on.
    """

    rmse: float
    r2: float
    samples: int

    size = 4
    unit = RMSE

    @staticmethod
    def counts(logits: Tensor, batch: Batch, task: Task, part: Part, seen: int) -> Tensor:  # noqa: ARG004 - there are no classes
        """Samples, sum of squared errors, sum of targets and of their squares."""
        y = batch.y.double()
        errors = logits[:, 0].double() - y
        return torch.stack([y.new_tensor(len(y)), errors.square().sum(), y.sum(), y.square().sum()])

    @classmethod
    def of(cls, counts: Sequence[float]) -> Errors:
        """Root of the mean squared error, and R²."""
        samples, errors, total, squares = counts
        if not samples:
            return cls(math.nan, math.nan, 0)
        spread = squares - total**2 / samples
        return cls(math.sqrt(errors / samples), 1 - errors / spread if spread > 0 else math.nan, int(samples))

    @staticmethod
    def guess(stream: TaskStream, part: Part) -> list[float]:
        """The mean of each task's targets, whose error is their standard deviation."""
        return [float(getattr(task, part).labels.double().std(correction=0)) for task in stream]

    @property
    def value(self) -> float:
        """The root mean squared error."""
        return self.rmse

    @property
    def count(self) -> int:
        """Samples."""
        return self.samples

    def __str__(self) -> str:
        return f"RMSE {self.rmse:.3f}, R² {self.r2:.3f}   ({self.samples:,} samples)"


SCORES: dict[str, type[Score]] = {"classes": Accuracy, "tokens": Bits, "numbers": Errors}
"""The type of score for each value of ``Modality.scoring``."""


def score_of(stream: TaskStream) -> type[Score]:
    """The type of score that models get on a stream."""
    return SCORES[stream.dataset.modality.scoring]


def _text_bytes(dataset: Dataset) -> NDArray[np.int64] | None:
    """Bytes of text behind the samples of a language data set, if they are known; see :class:`Tokens`."""
    return dataset.samples.text_bytes if isinstance(dataset.samples, Tokens) else None
