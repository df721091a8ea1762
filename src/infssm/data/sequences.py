"""Samples of variable length: audio, multichannel series, tokens."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infssm.data import audio
from infssm.data.audio import FrameStream, log_energies, mel_bank, read_sound, sound_length, step_of
from infssm.data.facts import ExportedInput, LogEnergies, SampleFacts, SampleLike, Waveform, facts_class
from infssm.data.files import Files, digest
from infssm.data.npz import read_series
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from infssm.data.dataset import Dataset
    from infssm.data.recipes import Recipe

BYTES = 256
"""Tokens of text whose bytes are the tokens."""


@dataclass(frozen=True)
class SequenceFacts(SampleFacts, kind="series"):
    """What the sequences of a data set are like; see :class:`~infssm.data.facts.SampleFacts`.

    Attributes:
        name: name the data set was loaded by.
        kind: what a step is, see :class:`Sequences`.
        width: numbers per step; for tokens, how many different ones there are.
        rate: samples per second of audio; None for other kinds.
        bands: frequency bands that take the place of the waveform; None for the waveform itself.
    """

    stored_as = "sequences"
    suffixes = frozenset({".npy", ".npz", ".csv"})
    name: str
    kind: str
    width: int
    rate: int | None = None
    bands: int | None = None

    @property
    def size(self) -> int:
        """The numbers per step, or the vocabulary."""
        return self.width

    def read(self, sample: SampleLike, recipe: Recipe | None = None) -> Tensor:  # noqa: ARG002 - recipes are for images
        """Float32 ``[time, width]``."""
        values = self._values(sample).float()
        if values.ndim != 2 or values.shape[1] != self.width or not len(values):
            raise DataError(f"a series must be numbers [time, {self.width}], got {list(values.shape)}")
        return _finite(values)

    def _values(self, sample: SampleLike) -> Tensor:
        if isinstance(sample, (str, os.PathLike)):
            path, found = Path(sample), list(read_series(Path(sample)).values())
            if len(found) != 1:
                raise DataError(f"{path} holds {len(found)} series: give one")
            sample = found[0]
        if not isinstance(sample, (np.ndarray, Tensor)):
            raise DataError(f"a series is an array, a tensor or a file; got {type(sample).__name__}")
        return torch.as_tensor(np.array(sample) if isinstance(sample, np.ndarray) else sample)

    def raw(self, sample: SampleLike) -> Tensor:
        """As model input."""
        return self.read(sample)

    def samples_in(self, file: Path) -> Mapping[str, Any]:
        """One series of an ``.npy`` or ``.csv``, all of an ``.npz``."""
        return read_series(file)

    def frames(self) -> FrameStream | None:
        """What makes model input of a sound that arrives in pieces; None where its pieces are model input."""
        return None

    def fit(self, dataset: Dataset, recipe: Recipe | None) -> Dataset:  # noqa: ARG002 - as above
        """As it is: series are not converted."""
        found = dataset.facts
        if not isinstance(found, SequenceFacts) or replace(found, name=self.name) != self:
            width = f" of width {found.width}" if isinstance(found, SequenceFacts) else ""
            raise DataError(
                f"the learner knows {self.kind} of width {self.width}, and {dataset.name} holds {found.kind}{width}"
            )
        return dataset

    def exported(self, recipe: Recipe | None) -> ExportedInput:  # noqa: ARG002 - as above
        """Series of any length."""
        example = torch.randn(2, 24, self.width, generator=torch.Generator().manual_seed(0))
        reading = f'series = numpy.load("series.npy").astype(numpy.float32)  # [time, {self.width}]'
        return ExportedInput("series", example, reading)


class TokenFacts(SequenceFacts, kind="tokens"):
    """What tokens are like."""

    def read(self, sample: SampleLike, recipe: Recipe | None = None) -> Tensor:  # noqa: ARG002 - as above
        """Int64 ``[time]``."""
        values = self._values(sample)
        if values.ndim != 1 or not len(values) or values.is_floating_point():
            raise DataError(f"tokens must be integers [time], got {values.dtype} {list(values.shape)}")
        if values.min() < 0 or values.max() >= self.width:
            raise DataError(f"tokens must be from 0 to {self.width - 1}, got {values.min()} to {values.max()}")
        return values.long()

    def read_prompt(self, prompt: str | Tensor, tokenizer: Any = None) -> Tensor:
        """Text, or ids ``[tokens]`` or ``[batch, tokens]``, as ids int64 ``[batch, tokens]``.

        ``tokenizer`` is that of the training text; None if its bytes are the tokens.
        """
        if not isinstance(prompt, str):
            flat = self.read(prompt.flatten())
            return flat.view(prompt.shape) if prompt.ndim == 2 else flat[None]
        if tokenizer is None and self.width != BYTES:
            raise ConfigError(
                f"the model has {self.width} tokens of a tokenizer: encode the text, and give ids [tokens]"
            )
        ids = list(prompt.encode()) if tokenizer is None else tokenizer.encode(prompt, add_special_tokens=False).ids
        if not ids:
            raise DataError("the prompt is empty: give at least one token")
        return self.read(torch.tensor(ids))[None]

    def exported(self, recipe: Recipe | None) -> ExportedInput:  # noqa: ARG002 - as above
        """Tokens of any length."""
        example = torch.randint(self.width, (2, 24), generator=torch.Generator().manual_seed(0))
        return ExportedInput("tokens", example, 'tokens = numpy.load("tokens.npy").astype(numpy.int64)  # [time]')


class SoundFacts(SequenceFacts, kind="audio"):
    """What sounds are like."""

    suffixes = audio.SUFFIXES

    @property
    def hertz(self) -> int:
        """Samples per second."""
        if self.rate is None:
            raise DataError(f"{self.name}: the facts of these sounds have no rate, so they are damaged")
        return self.rate

    def read(self, sample: SampleLike, recipe: Recipe | None = None) -> Tensor:
        """The waveform ``[samples, 1]``, or its log energies ``[time, bands]``, which may also be given."""
        if self.bands is not None and isinstance(sample, (np.ndarray, Tensor)) and sample.ndim == 2:
            return super().read(sample, recipe)
        sound = self.raw(sample)
        if self.bands is None:
            return sound[:, None]
        return log_energies(sound, self.hertz, mel_bank(self.bands, self.hertz))

    def raw(self, sample: SampleLike) -> Tensor:
        """A wav file, or a waveform ``[samples]`` or ``[samples, 1]`` from -1 to 1, as float32 ``[samples]``."""
        if isinstance(sample, (str, os.PathLike)):
            return _finite(torch.from_numpy(read_sound(Path(sample), self.hertz)))
        if not isinstance(sample, (np.ndarray, Tensor)):
            raise DataError(f"a sound is a wav file, an array or a tensor; got {type(sample).__name__}")
        sound = torch.as_tensor(sample, dtype=torch.float32)
        sound = sound.squeeze(-1) if sound.ndim == 2 else sound
        if sound.ndim != 1 or not len(sound):
            raise DataError(f"a sound must be numbers [samples], got {list(sound.shape)}")
        return _finite(sound)

    samples_in = SampleFacts.samples_in

    def frames(self) -> FrameStream | None:
        """See :class:`SequenceFacts`."""
        return None if self.bands is None else FrameStream(self.hertz, self.bands)

    def fit(self, dataset: Dataset, recipe: Recipe | None) -> Dataset:
        """At the same rate, in the same bands."""
        if isinstance(dataset.samples, SoundFiles):
            dataset = in_bands(replace(dataset, samples=replace(dataset.samples, rate=self.hertz)), self.bands)
        return super().fit(dataset, recipe)

    def exported(self, recipe: Recipe | None) -> ExportedInput:  # noqa: ARG002 - as above
        """Waveforms of any length."""
        rate = self.hertz
        example = torch.randn(2, rate // 4, generator=torch.Generator().manual_seed(0))
        reading = f"""with wave.open("sound.wav") as file:
    assert file.getparams()[:3] == (1, 2, {rate}), "convert it to one channel, 16 bits, {rate} samples per second"
    sound = numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype(numpy.float32) / 32768"""
        before = Waveform() if self.bands is None else LogEnergies(self.bands, rate)
        return ExportedInput("sound", example, reading, ", wave", {"rate": rate}, before)


def _finite(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise DataError(f"{bad} of {values.numel():,} values are NaN or infinite: replace them or leave the sample out")
    return values


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
        found: SequenceFacts = facts_class(self.kind)(name, self.kind, self.width)
        return found

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
        return SoundFacts(name, self.kind, self.width, self.rate)

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


class Spectra(Sequences):
    """Log energies of sounds in ``bands`` frequency bands of equal width on the mel scale, read when asked for.

    Args:
        sounds: the waveforms.
        bands: numbers per step.
    """

    kind: str = "series"

    def __init__(self, sounds: SoundFiles, bands: int) -> None:
        self.sounds, self.width = sounds, bands
        self._bank = mel_bank(bands, sounds.rate)
        self._known: dict[int, Tensor] = {}

    @cached_property
    def lengths(self) -> NDArray[np.int64]:  # type: ignore[override]
        """See :class:`Sequences`."""
        return 1 + (self.sounds.lengths - 1) // step_of(self.sounds.rate)

    def sequence(self, index: int) -> Tensor:
        """See :class:`Sequences`; computed once."""
        if index not in self._known:
            self._known[index] = log_energies(self.sounds.sequence(index)[:, 0], self.sounds.rate, self._bank)
        return self._known[index]

    @property
    def contents(self) -> dict[str, str]:
        """Digests of the files of the sounds."""
        return self.sounds.contents

    def facts(self, name: str) -> SequenceFacts:
        """See :class:`Sequences`."""
        return SoundFacts(name, self.sounds.kind, self.width, self.sounds.rate, self.width)

    def fingerprint(self) -> str:
        """Digest of the sounds' own and the number of bands."""
        return digest([f"{self.sounds.fingerprint()} {self.width}"])


def in_bands(dataset: Dataset, bands: int | None) -> Dataset:
    """A data set of sounds with ``bands`` log energies instead of the waveform; unchanged if that is None."""
    if bands is None:
        return dataset
    if not isinstance(dataset.samples, SoundFiles):
        raise ConfigError(f"data.bands is for audio, and {dataset.name} holds none: leave it out")
    return replace(dataset, samples=Spectra(dataset.samples, bands))
