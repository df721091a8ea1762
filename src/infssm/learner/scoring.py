"""What is counted when a model is tested: right answers of classes, bits of language."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from infssm._batch import IGNORED
from infssm.data import Batch, Dataset, Task, TaskStream, Tokens
from infssm.data.loader import Part
from infssm.learner.metrics import ACCURACY, BITS_PER_BYTE, BITS_PER_TOKEN, Measure


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
        bytes: bytes that those tokens stand for; 0 where they are unknown.
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


Score = Accuracy | Bits


class Scoring(Protocol):
    """Counts over batches; counts of processes add up."""

    size: int
    """How many numbers are counted."""

    def counts(self, logits: Tensor, batch: Batch) -> Tensor:
        """What one batch adds, float64 [k]."""

    def score(self, counts: Tensor) -> Score:
        """What the sum of all counts says."""


class ClassScoring:
    """Right answers among the classes [0, seen), and inside the task."""

    size = 3

    def __init__(self, task: Task, seen: int, confusion: Tensor | None = None) -> None:
        self._classes, self._seen, self._confusion = task.classes, seen, confusion

    def counts(self, logits: Tensor, batch: Batch) -> Tensor:
        """Right, right inside the task, images; adds to the confusion, where given."""
        y, classes, seen = batch.y, self._classes, self._seen
        inside = logits[:, classes.start : classes.stop].argmax(1) + classes.start
        predicted = logits[:, :seen].argmax(1)
        if self._confusion is not None:
            self._confusion += torch.bincount(y * seen + predicted, minlength=seen * seen).view(seen, seen)
        return torch.stack([(predicted == y).sum(), (inside == y).sum(), y.new_tensor(len(y))]).double()

    def score(self, counts: Tensor) -> Accuracy:
        """Fractions; NaN without images."""
        right, inside, images = counts.tolist()
        if not images:
            return Accuracy(math.nan, math.nan, 0)
        return Accuracy(right / images, inside / images, int(images))


class TokenScoring:
    """Bits of every predicted token, and the bytes of text behind them.

    Args:
        text_bytes: int64 [samples of the data set] bytes that the predicted tokens of each sample stand for, where they
            are known.
    """

    size = 3

    def __init__(self, text_bytes: NDArray[np.int64] | None = None) -> None:
        self._text_bytes = text_bytes

    def counts(self, logits: Tensor, batch: Batch) -> Tensor:
        """Sum of bits, tokens, bytes."""
        y = batch.y.flatten()
        nats = F.cross_entropy(logits.float().flatten(0, 1), y, ignore_index=IGNORED, reduction="none").double().sum()
        text = 0
        if self._text_bytes is not None and batch.index is not None:
            text = int(self._text_bytes[batch.index.numpy()].sum())
        return torch.stack([nats / math.log(2), (y != IGNORED).sum().double(), nats.new_tensor(text)])

    def score(self, counts: Tensor) -> Bits:
        """Means; NaN without tokens."""
        bits, tokens, text = counts.tolist()
        if not tokens:
            return Bits(math.nan, math.nan, math.nan, 0, 0)
        mean = bits / tokens
        per_byte = bits / text if text else math.nan
        return Bits(per_byte, mean, 2**mean if mean < 1000 else math.inf, int(tokens), int(text))


def measure_for(stream: TaskStream) -> Measure:
    """What a stream measures of a model."""
    if not stream.dataset.language:
        return ACCURACY
    return BITS_PER_TOKEN if text_bytes_of(stream.dataset) is None else BITS_PER_BYTE


def guess_of(stream: TaskStream, part: Part) -> list[float]:
    """What guessing reaches on a part of each task: one of the classes, or any token of the vocabulary."""
    if not stream.dataset.language:
        return [1 / stream.num_classes] * len(stream)
    text_bytes, bits = text_bytes_of(stream.dataset), math.log2(stream.num_classes)
    if text_bytes is None:
        return [bits] * len(stream)
    predicted = stream.dataset.sequences.lengths - 1
    indices = [getattr(task, part).indices for task in stream]
    return [bits * (float(predicted[mine].sum()) / max(1, int(text_bytes[mine].sum()))) for mine in indices]


def text_bytes_of(dataset: Dataset) -> NDArray[np.int64] | None:
    """Bytes of text behind the samples of a language data set, where they are known; see :class:`Tokens`."""
    return dataset.samples.text_bytes if isinstance(dataset.samples, Tokens) else None
