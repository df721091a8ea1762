"""What is counted when a model is tested: right answers of classes, bits of language, errors of numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from infssm._batch import IGNORED
from infssm.data import Batch, Dataset, Task, TaskStream, Tokens
from infssm.data.loader import Part
from infssm.learner.metrics import ACCURACY, BITS_PER_BYTE, BITS_PER_TOKEN, RMSE, Measure


class Accuracy(NamedTuple):
    """Fractions of ``images`` that are right: among all ``seen`` classes, and inside the image's own task."""

    class_incremental: float
    task_incremental: float
    images: int

    @property
    def value(self) -> float:
        """What the matrix holds."""
        return self.class_incremental

    @property
    def inside(self) -> float | None:
        """The same, decided inside the task."""
        return self.task_incremental

    @property
    def samples(self) -> int:
        """What it was measured on."""
        return self.images


class Bits(NamedTuple):
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

    @property
    def value(self) -> float:
        """What the matrix holds."""
        return self.bits_per_byte if self.bytes else self.bits_per_token

    @property
    def inside(self) -> float | None:
        """Language is not decided inside a task."""
        return None

    @property
    def samples(self) -> int:
        """What it was measured on."""
        return self.bytes or self.tokens


class Errors(NamedTuple):
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

    @property
    def value(self) -> float:
        """What the matrix holds."""
        return self.rmse

    @property
    def inside(self) -> float | None:
        """Numbers are not decided inside a task."""
        return None


Score = Accuracy | Bits | Errors


class Scoring(ABC):
    """Counts over the batches of one part of a task; counts of several processes add up.

    Args:
        task: the task.
        seen: how many classes there are to choose from.
        confusion: [seen, seen] images by true and predicted class, added to where given.
    """

    size: ClassVar[int]
    """How many numbers are counted."""
    has_classes: ClassVar[bool] = True
    """Whether samples have classes, which can be mistaken for each other."""

    def __init__(self, task: Task, seen: int, confusion: Tensor | None = None) -> None:
        self.task, self.seen, self.confusion = task, seen, confusion

    @abstractmethod
    def counts(self, logits: Tensor, batch: Batch) -> Tensor:
        """What one batch adds, float64 [k]."""

    @abstractmethod
    def score(self, counts: Tensor) -> Score:
        """The score that follows from the sum of all counts."""

    @classmethod
    @abstractmethod
    def measure(cls, stream: TaskStream) -> Measure:
        """What the matrix of a stream holds."""

    @classmethod
    @abstractmethod
    def guess(cls, stream: TaskStream, part: Part) -> list[float]:
        """What guessing reaches on a part of each task."""


class ClassScoring(Scoring):
    """Right answers among the classes [0, seen), and inside the task."""

    size = 3

    def counts(self, logits: Tensor, batch: Batch) -> Tensor:
        """Right, right inside the task, images; adds to the confusion, where given."""
        y, classes, seen = batch.y, self.task.classes, self.seen
        inside = logits[:, classes.start : classes.stop].argmax(1) + classes.start
        predicted = logits[:, :seen].argmax(1)
        if self.confusion is not None:
            self.confusion += torch.bincount(y * seen + predicted, minlength=seen * seen).view(seen, seen)
        return torch.stack([(predicted == y).sum(), (inside == y).sum(), y.new_tensor(len(y))]).double()

    def score(self, counts: Tensor) -> Accuracy:
        """Fractions; NaN without images."""
        right, inside, images = counts.tolist()
        if not images:
            return Accuracy(math.nan, math.nan, 0)
        return Accuracy(right / images, inside / images, int(images))

    @classmethod
    def measure(cls, stream: TaskStream) -> Measure:  # noqa: ARG003 - the same for all
        """The accuracy."""
        return ACCURACY

    @classmethod
    def guess(cls, stream: TaskStream, part: Part) -> list[float]:  # noqa: ARG003 - the same for all
        """One of the classes."""
        return [1 / stream.num_classes] * len(stream)


class TokenScoring(Scoring):
    """Bits of every predicted token, and the bytes of text behind them."""

    size = 3
    has_classes = False

    def counts(self, logits: Tensor, batch: Batch) -> Tensor:
        """Sum of bits, tokens, bytes."""
        y = batch.y.flatten()
        nats = F.cross_entropy(logits.float().flatten(0, 1), y, ignore_index=IGNORED, reduction="none").double().sum()
        known, text = _text_bytes(self.task.test.dataset), 0
        if known is not None and batch.index is not None:
            text = int(known[batch.index.numpy()].sum())
        return torch.stack([nats / math.log(2), (y != IGNORED).sum().double(), nats.new_tensor(text)])

    def score(self, counts: Tensor) -> Bits:
        """Means; NaN without tokens."""
        bits, tokens, text = counts.tolist()
        if not tokens:
            return Bits(math.nan, math.nan, math.nan, 0, 0)
        mean = bits / tokens
        per_byte = bits / text if text else math.nan
        return Bits(per_byte, mean, 2**mean if mean < 1000 else math.inf, int(tokens), int(text))

    @classmethod
    def measure(cls, stream: TaskStream) -> Measure:
        """Bits per byte, which different tokenizers can be compared by; per token where the bytes are unknown."""
        return BITS_PER_TOKEN if _text_bytes(stream.dataset) is None else BITS_PER_BYTE

    @classmethod
    def guess(cls, stream: TaskStream, part: Part) -> list[float]:
        """Any token of the vocabulary."""
        text_bytes, bits = _text_bytes(stream.dataset), math.log2(stream.num_classes)
        if text_bytes is None:
            return [bits] * len(stream)
        predicted = stream.dataset.sequences.lengths - 1
        indices = [getattr(task, part).indices for task in stream]
        return [bits * (float(predicted[mine].sum()) / max(1, int(text_bytes[mine].sum()))) for mine in indices]


class NumberScoring(Scoring):
    """Squared errors of predicted numbers, and the moments of their targets."""

    size = 4
    has_classes = False

    def counts(self, logits: Tensor, batch: Batch) -> Tensor:
        """Samples, sum of squared errors, sum of targets and of their squares."""
        y = batch.y.double()
        errors = logits[:, 0].double() - y
        return torch.stack([y.new_tensor(len(y)), errors.square().sum(), y.sum(), y.square().sum()])

    def score(self, counts: Tensor) -> Errors:
        """Root of the mean squared error, and R²; NaN without samples."""
        samples, errors, total, squares = counts.tolist()
        if not samples:
            return Errors(math.nan, math.nan, 0)
        spread = squares - total**2 / samples
        return Errors(math.sqrt(errors / samples), 1 - errors / spread if spread > 0 else math.nan, int(samples))

    @classmethod
    def measure(cls, stream: TaskStream) -> Measure:  # noqa: ARG003 - the same for all
        """The root mean squared error, in the unit of the targets."""
        return RMSE

    @classmethod
    def guess(cls, stream: TaskStream, part: Part) -> list[float]:
        """The mean of each task's targets, whose error is their standard deviation."""
        return [float(getattr(task, part).labels.double().std(correction=0)) for task in stream]


SCORINGS: dict[str, type[Scoring]] = {"classes": ClassScoring, "tokens": TokenScoring, "numbers": NumberScoring}
"""By ``Modality.scoring``."""


def scoring_of(stream: TaskStream) -> type[Scoring]:
    """How models are measured on a stream."""
    return SCORINGS[stream.dataset.modality.scoring]


def _text_bytes(dataset: Dataset) -> NDArray[np.int64] | None:
    """Bytes of text behind the samples of a language data set, where they are known; see :class:`Tokens`."""
    return dataset.samples.text_bytes if isinstance(dataset.samples, Tokens) else None
