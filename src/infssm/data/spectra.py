"""Sounds as log energies in frequency bands, a step every hundredth of a second: shorter than the waveform."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infssm.data.facts import SequenceFacts
from infssm.data.files import digest
from infssm.data.sequences import Sequences, SoundFiles
from infssm.errors import ConfigError

if TYPE_CHECKING:
    from infssm.data.dataset import Dataset

_STEP, _WINDOW = 0.01, 0.032
"""Seconds from one step to the next, and of sound that each step is made of."""
_QUIET = 1e-6
"""Energy that counts as silence; the rounding error of 16-bit samples has about this energy."""


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
        return SequenceFacts(name, self.sounds.kind, self.width, self.sounds.rate, self.width)

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


def log_energies(sound: Tensor, rate: int, bank: Tensor) -> Tensor:
    """A waveform [samples] as log energies float32 [1 + (samples - 1) // step, bands], 0 for silence.

    Args:
        sound: values from -1 to 1.
        rate: samples per second.
        bank: [bands, frequencies], see :func:`mel_bank`.
    """
    step, window = step_of(rate), 2 * (bank.shape[1] - 1)
    frames = 1 + (len(sound) - 1) // step
    padded = torch.zeros((frames - 1) * step + window)
    padded[: min(len(sound), len(padded))] = sound[: len(padded)]
    cut = padded.unfold(0, window, step) * torch.hann_window(window)
    energy = torch.fft.rfft(cut).abs().square() / window @ bank.T
    return log_of(energy)


class FrameStream:
    """`log_energies` of a waveform that arrives in pieces; keeps less than a window and a step of samples.

    Args:
        rate: samples per second.
        bands: numbers per step.
    """

    def __init__(self, rate: int, bands: int) -> None:
        self._rate, self._bank = rate, mel_bank(bands, rate)
        self._samples = torch.zeros(0)  # from the start of the first frame that is not complete

    def push(self, sound: Tensor) -> tuple[Tensor, Tensor]:
        """Frames that ``sound: [samples]`` completes, and those after them as if the sound ended here.

        Both are float32 [frames, bands]; later samples change the second ones.
        """
        step, window = step_of(self._rate), 2 * (self._bank.shape[1] - 1)
        samples = torch.cat((self._samples, sound))
        complete = max(0, 1 + (len(samples) - window) // step)
        self._samples = samples[complete * step :].clone()
        frames = log_energies(samples, self._rate, self._bank)
        return frames[:complete], frames[complete:]


def log_of(energy: Tensor) -> Tensor:
    """Energies to the scale that models read: 0 for silence, 1 for a thousand times the quietest sound."""
    return torch.log10(energy.clamp(min=_QUIET) / _QUIET) / 3


def mel_bank(bands: int, rate: int) -> Tensor:
    """Triangular bands over the frequencies of a window: float32 [bands, window // 2 + 1]."""
    frequencies = int(_WINDOW * rate) // 2 + 1
    if not 1 <= bands <= frequencies // 2:
        raise ConfigError(f"data.bands={bands}: sounds of {rate} samples per second have 1 to {frequencies // 2} bands")
    mel = 2595 * np.log10(1 + np.linspace(0, rate / 2, frequencies) / 700)
    edges = np.linspace(0, mel[-1], bands + 2)
    rising = (mel - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - mel) / (edges[2:] - edges[1:-1])[:, None]
    bank = np.clip(np.minimum(rising, falling), 0, None)
    return torch.from_numpy((bank / np.maximum(bank.sum(axis=1, keepdims=True), 1e-12)).astype(np.float32))


def step_of(rate: int) -> int:
    """Samples from one step to the next."""
    return max(1, round(_STEP * rate))
