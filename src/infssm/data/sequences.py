"""Samples of variable length: audio, multichannel series, tokens."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infssm.data.audio import read_sound, sound_length
from infssm.data.facts import SequenceFacts
from infssm.data.files import Files, digest
from infssm.errors import DataError


class Sequences(ABC):
    """An indexed collection of sequences.

    Attributes:
        kind: what a step is: a value of a waveform, a row of numbers, or a token.
        width: numbers per step; for tokens, how many different ones there are.
        lengths: steps of every sequence: int64 [n], each at least 1.
    """

    kind: str
    width: int
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def sequence(self, index: int) -> Tensor:
        """Sequence ``index``: float32 [length, width], or int64 [length] for tokens."""

    def facts(self, name: str) -> SequenceFacts:
        """Facts about the sequences of the data set ``name`` that a model needs."""
        return SequenceFacts(name, self.kind, self.width)

    @abstractmethod
    def fingerprint(self) -> str:
        """Digest that changes when sequences are added, removed, reordered, altered or cut otherwise."""


class ArraySequences(Sequences):
    """Series of numbers in memory.

    Args:
        values: [n, time, width]; converted to float32.
        lengths: int64 [n] steps that count; the rest is padding. All unless given.
    """

    kind: str = "series"

    def __init__(self, values: NDArray[Any], lengths: NDArray[Any] | None = None) -> None:
        if values.ndim != 3 or not np.issubdtype(values.dtype, np.number) or np.iscomplexobj(values):
            raise DataError(f"series must be numbers [n, time, channels], got {values.dtype} {list(values.shape)}")
        count, time, self.width = values.shape
        steps = np.full(count, time) if lengths is None else lengths
        if steps.shape != (count,) or not np.issubdtype(steps.dtype, np.integer):
            raise DataError(f"lengths must be integers [{count}], got {steps.dtype} {list(steps.shape)}")
        if count and (steps.min() < 1 or steps.max() > time):
            raise DataError(f"lengths run from {steps.min()} to {steps.max()}; series of {time} steps need 1 to {time}")
        with np.errstate(over="ignore"):  # values too large for float32 become infinite and are refused below
            self.values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        self.lengths = steps.astype(np.int64)
        bad = [n for n in range(count) if not bool(torch.isfinite(self.sequence(n)).all())]
        if bad:
            raise DataError(f"{len(bad)} series hold values that are not finite, first number {bad[0]}")

    def sequence(self, index: int) -> Tensor:
        """See :class:`Sequences`."""
        return self.values[index, : int(self.lengths[index])]

    def fingerprint(self) -> str:
        """Digest of shape, lengths and all values."""
        return digest([str(tuple(self.values.shape)), self.lengths.astype("<i8").tobytes(), self.values.numpy().data])


class MeasuredSeries(ArraySequences):
    """Series in memory with a number each, which a model learns to predict.

    Args:
        values: see :class:`ArraySequences`, as ``lengths``.
        targets: [n] numbers; converted to float32. Give them about unit scale: the loss is their mean squared error.
        lengths: see above.
    """

    kind: str = "measured"

    def __init__(self, values: NDArray[Any], targets: NDArray[Any], lengths: NDArray[Any] | None = None) -> None:
        super().__init__(values, lengths)
        with np.errstate(over="ignore"):  # as for the values
            self.targets: NDArray[np.float32] = np.asarray(targets).astype(np.float32)
        if self.targets.shape != (len(self),) or not np.isfinite(self.targets).all():
            raise DataError(f"targets must be finite numbers [{len(self)}], one for each series")

    def fingerprint(self) -> str:
        """Digest of the series and of their targets."""
        return digest([super().fingerprint(), self.targets.tobytes()])


def token_type(vocabulary: int) -> type[np.integer[Any]]:
    """The smallest type that holds every token of a vocabulary."""
    return np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.int32


class Tokens(Sequences):
    """Tokens in memory, cut into sequences.

    Args:
        tokens: sequences one after the other, [total]; kept in the smallest type that holds the vocabulary.
        lengths: int64 [n] tokens of each.
        vocabulary: how many different tokens there are.
        text_bytes: int64 [n] bytes of the text that the tokens of each sequence but its first stand for, to report bits
            per byte; None if they are unknown.
    """

    kind: str = "tokens"

    def __init__(
        self,
        tokens: NDArray[Any],
        lengths: Sequence[int] | NDArray[Any],
        vocabulary: int,
        text_bytes: NDArray[np.int64] | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if len(tokens) != self.lengths.sum() or (len(self.lengths) and self.lengths.min() < 1):
            raise DataError(f"{len(tokens)} tokens do not make sequences of {int(self.lengths.sum())}")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocabulary):
            raise DataError(f"tokens run from {tokens.min()} to {tokens.max()}; the vocabulary has {vocabulary}")
        self.width = vocabulary
        self.tokens = np.ascontiguousarray(tokens, dtype=token_type(vocabulary))
        self.text_bytes = text_bytes
        self._starts = np.cumsum(self.lengths) - self.lengths

    def sequence(self, index: int) -> Tensor:
        """See :class:`Sequences`."""
        start = int(self._starts[index])
        return torch.from_numpy(self.tokens[start : start + int(self.lengths[index])].astype(np.int64))

    def fingerprint(self) -> str:
        """Digest of all tokens and lengths."""
        starts = range(0, len(self.tokens), 1 << 16)  # in pieces: a 32-bit copy of all tokens may not fit
        pieces = (self.tokens[start : start + (1 << 16)].astype("<i4").tobytes() for start in starts)
        return digest(itertools.chain([self.lengths.astype("<i8").tobytes(), str(self.width)], pieces))


@dataclass(frozen=True, eq=False)
class SoundFiles(Files, Sequences):
    """Audio in wav or flac files, channels averaged, read when asked for.

    Attributes:
        rate: samples per second; files of another rate are resampled.
    """

    word = "sound"
    kind = "audio"
    width = 1
    rate: int

    @cached_property
    def lengths(self) -> NDArray[np.int64]:  # type: ignore[override]
        """See :class:`Sequences`; by the files' headers."""
        return np.array([sound_length(self.root / path, self.rate) for path in self.paths], dtype=np.int64)

    def sequence(self, index: int) -> Tensor:
        """See :class:`Sequences`; values from -1 to 1."""
        return torch.from_numpy(read_sound(self.root / self.paths[index], self.rate))[:, None]

    def facts(self, name: str) -> SequenceFacts:
        """See :class:`Sequences`; with the rate, to which other files are converted."""
        return SequenceFacts(name, self.kind, self.width, self.rate)

    def why_unreadable(self, index: int) -> str | None:
        """See :class:`~infssm.data.files.Files`."""
        try:
            self.sequence(index)
        except DataError as error:
            return str(error)
        return None

    def fingerprint(self) -> str:
        """Digest of the rate, the paths and the contents of all files."""
        return digest([f"{self.rate} {super().fingerprint()}"])
