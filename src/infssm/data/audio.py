"""Sound files (wav by itself, flac through soundfile where that is installed), and log energies in frequency bands."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infssm._optional import require
from infssm.data.files import require_regular
from infssm.errors import ConfigError, DataError

SUFFIXES = frozenset({".wav", ".flac"})
"""Endings of the files that are read as sounds."""
FLAC = "pip install soundfile"

_LONGEST = 1 << 28
"""Values (samples times channels) of the longest sound that is read: 2 GiB in float64."""
_FASTEST = 768_000
"""Samples per second. Converting a rate takes a filter of 20 times the larger rate, so rates are bounded too."""
_RATIO = 1000
"""Largest ratio of two rates that are converted; a header with a larger one is damaged."""
_CHUNKS = 1000
"""Chunks of a wav file that may come before the samples."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_WIDTHS = {_PCM: (1, 2, 3, 4), _FLOAT: (4, 8)}
_SAVE = "save it as 16-bit PCM wav"


class _Sound(NamedTuple):
    """The contents of a header; ``read`` returns the values, float64 [samples, channels]."""

    samples: int
    channels: int
    rate: int
    read: Any


def sound_length(path: Path, rate: int) -> int:
    """Samples of a file at ``rate`` per second, by its header; DataError if it cannot be read."""
    with _open(path) as sound:
        return _resampled_length(path, sound, rate)


def sound_rate(path: Path) -> int:
    """Samples per second of a file, by its header; DataError if it cannot be read."""
    with _open(path) as sound:
        return sound.rate


def read_sound(path: Path, rate: int) -> NDArray[np.float32]:
    """A file as float32 [samples] at ``rate`` per second, PCM from -1 to 1; several channels are averaged.

    DataError names a file that cannot be read and what to do about it.
    """
    with _open(path) as sound:
        _resampled_length(path, sound, rate)
        values: NDArray[np.float64] = sound.read()
    with np.errstate(over="ignore", invalid="ignore"):  # floating-point files may hold anything; checked below
        result = _resample(values.mean(axis=1), sound.rate, rate).astype(np.float32)
    if not np.isfinite(result).all():
        raise DataError(f"{path} holds values that are not finite: replace or delete it")
    return result


@contextlib.contextmanager
def _open(path: Path) -> Iterator[_Sound]:
    """A sound whose header was checked, so that nothing larger than the file or the limits is ever allocated."""
    try:
        with contextlib.ExitStack() as stack:
            size = require_regular(path)
            sound = _open_flac(path, stack) if path.suffix.lower() == ".flac" else _open_wav(path, size, stack)
            if not 0 < sound.rate <= _FASTEST:
                raise ValueError(f"its header claims {sound.rate:,} samples per second; 1 to {_FASTEST:,} are read")
            if not 0 < sound.samples * sound.channels <= _LONGEST:
                raise DataError(f"{path} holds {sound.samples:,} samples of {sound.channels} channels: replace it")
            yield sound
    except (DataError, ConfigError):
        raise
    except Exception as error:  # damaged bytes make soundfile raise whatever it likes
        reason = getattr(error, "strerror", None) or str(error) or "it ends before its header does"
        raise DataError(f"cannot read {path}: {reason}; {_SAVE}") from error


def _open_wav(path: Path, size: int, stack: contextlib.ExitStack) -> _Sound:
    file = stack.enter_context(path.open("rb"))
    form, length = _chunks(file)
    code, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if code == _EXTENSIBLE and len(form) >= 26:
        code = int.from_bytes(form[24:26], "little")
    width = (bits + 7) // 8
    if code not in _WIDTHS:
        raise ValueError(f"its samples are compressed (wav format {code})")
    if width not in _WIDTHS[code] or not channels:
        raise ValueError(f"its header claims {channels} channels of {bits} bits")
    samples = length // (channels * width)
    there = (size - file.tell()) // (channels * width)
    if there < samples:
        raise DataError(f"{path} is cut short: {samples:,} samples are announced, {there:,} are there")

    def read() -> NDArray[np.float64]:
        content = file.read(samples * channels * width)
        return _decode(content, code, width).reshape(-1, channels)

    return _Sound(samples, channels, rate, read)


def _chunks(file: BinaryIO) -> tuple[bytes, int]:
    """The format chunk and the number of bytes of the data chunk; the file then stands at the first sample."""
    riff, _, kind = struct.unpack("<4sI4s", _exactly(file, 12))
    if (riff, kind) != (b"RIFF", b"WAVE"):
        raise ValueError("it is not a wav file")
    form = b""
    for _ in range(_CHUNKS):
        name, length = struct.unpack("<4sI", _exactly(file, 8))
        if name == b"data":
            if len(form) < 16:
                raise ValueError("its format is missing")
            return form, length
        start = file.tell()
        if name == b"fmt ":
            form = file.read(min(length, 40))
        file.seek(start + length + length % 2)
    raise ValueError(f"there are no samples among its first {_CHUNKS} chunks")


def _exactly(file: BinaryIO, count: int) -> bytes:
    content = file.read(count)
    if len(content) < count:
        raise ValueError("it ends before its header does")
    return content


def _open_flac(path: Path, stack: contextlib.ExitStack) -> _Sound:
    soundfile = require("soundfile", install=f"flac needs it: {FLAC}")
    file = stack.enter_context(soundfile.SoundFile(str(path)))

    def read() -> NDArray[np.float64]:
        values: NDArray[np.float64] = file.read(dtype="float64", always_2d=True)
        if len(values) < file.frames:
            raise DataError(f"{path} is cut short: {file.frames:,} samples are announced, {len(values):,} are there")
        return values

    return _Sound(file.frames, file.channels, file.samplerate, read)


def _decode(content: bytes, code: int, width: int) -> NDArray[np.float64]:
    """Bytes to values; wav keeps 8 bits unsigned and all other integers signed, low byte first."""
    if code == _FLOAT:
        with np.errstate(invalid="ignore"):  # a signalling NaN is refused with all values that are not finite
            return np.frombuffer(content, np.dtype(f"<f{width}")).astype(np.float64)
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:
        parts = np.frombuffer(content, np.uint8).reshape(-1, 3)
        padded = np.zeros((len(parts), 4), np.uint8)
        padded[:, 1:] = parts
        content, width = padded.tobytes(), 4
    values = np.frombuffer(content, np.dtype(f"<i{width}")).astype(np.float64)
    return values / float(2 ** (8 * width - 1))


def _resampled_length(path: Path, sound: _Sound, rate: int) -> int:
    length = -(-sound.samples * rate // sound.rate)
    if length > _LONGEST or not 1 / _RATIO <= rate / sound.rate <= _RATIO:
        raise DataError(
            f"{path} has {sound.rate:,} samples per second, which cannot be converted to {rate:,}: correct its rate or "
            "delete it"
        )
    return length


def _resample(values: NDArray[np.float64], own: int, rate: int) -> NDArray[np.float64]:
    """[samples] at ``own`` per second to ``rate`` per second, without aliasing."""
    if own == rate:
        return values
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise ConfigError("resampling audio needs SciPy: pip install 'infssm[bench]'") from error
    common = math.gcd(own, rate)
    resampled: NDArray[np.float64] = resample_poly(values, rate // common, own // common)
    return resampled


_STEP, _WINDOW = 0.01, 0.032
"""Seconds from one step to the next, and of sound that each step is made of."""
_QUIET = 1e-6
"""Energy that counts as silence; the rounding error of 16-bit samples has about this energy."""


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
