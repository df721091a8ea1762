"""What is counted when a model is tested: right answers of classes, bits of language."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm._batch import IGNORED
from infssm.data import Batch, StreamFacts, Task
from infssm.learner.metrics import ACCURACY, BITS_PER_BYTE, BITS_PER_TOKEN, Measure

_BYTES = 256


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
    """Bits that the model takes to say a token, in the mean over ``tokens``, and its perplexity ``2 ** bits``."""

    bits: float
    perplexity: float
    tokens: int

    @property
    def value(self) -> float:
        """What the matrix holds."""
        return self.bits

    @property
    def inside(self) -> float | None:
        """Language is not decided inside a task."""
        return None

    @property
    def samples(self) -> int:
        """What it was measured on."""
        return self.tokens


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
    """Bits of every predicted token."""

    size = 2

    def counts(self, logits: Tensor, batch: Batch) -> Tensor:
        """Sum of bits, tokens."""
        y = batch.y.flatten()
        nats = F.cross_entropy(logits.float().flatten(0, 1), y, ignore_index=IGNORED, reduction="none").double().sum()
        return torch.stack([nats / math.log(2), (y != IGNORED).sum().double()])

    def score(self, counts: Tensor) -> Bits:
        """Means; NaN without tokens."""
        bits, tokens = counts.tolist()
        if not tokens:
            return Bits(math.nan, math.nan, 0)
        mean = bits / tokens
        return Bits(mean, 2**mean if mean < 1000 else math.inf, int(tokens))


def measure_for(facts: StreamFacts) -> Measure:
    """What a stream measures of a model."""
    if facts.kind != "language":
        return ACCURACY
    return BITS_PER_BYTE if facts.num_outputs == _BYTES else BITS_PER_TOKEN


def guess_of(facts: StreamFacts) -> float:
    """What guessing reaches: one of the classes, or a token of the vocabulary, whichever."""
    return math.log2(facts.num_outputs) if facts.kind == "language" else 1 / facts.num_outputs
