"""Reading wav files with the standard library: any PCM, any number of channels, any rate."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infssm.errors import ConfigError, DataError

_LONGEST = 1 << 28
"""Samples of the longest file that is read."""


def wav_length(path: Path, rate: int) -> int:
    """Samples of a file at ``rate`` per second, by its header; DataError where it cannot be read."""
    with _open(path) as file:
        return _resampled_length(file.getnframes(), file.getframerate(), rate)


def wav_rate(path: Path) -> int:
    """Samples per second of a file, by its header; DataError where it cannot be read."""
    with _open(path) as file:
        return file.getframerate()


def read_wav(path: Path, rate: int) -> NDArray[np.float32]:
    """A file as float32 [samples] from -1 to 1 at ``rate`` per second; several channels are averaged.

    PCM of 8, 16, 24 and 32 bits is read; DataError says what to do about anything else.
    """
    with _open(path) as file:
        frames, channels, width, own = (
            file.getnframes(),
            file.getnchannels(),
            file.getsampwidth(),
            file.getframerate(),
        )
        content = file.readframes(frames)
    if len(content) != frames * channels * width:
        raise DataError(f"{path} is cut short: {frames} samples are announced, {len(content) // width} are there")
    values = _decode(content, width).reshape(-1, channels).mean(axis=1)
    return _resample(values, own, rate).astype(np.float32)


def _open(path: Path) -> wave.Wave_read:
    try:
        file = wave.open(str(path), "rb")  # noqa: SIM115 - the caller closes it
    except (wave.Error, EOFError, OSError) as error:
        reason = str(error) or "it ends before its header does"
        raise DataError(f"cannot read {path}: {reason}; save it as 16-bit PCM wav") from error
    if file.getsampwidth() not in (1, 2, 3, 4) or not file.getnchannels() or not file.getframerate():
        raise DataError(f"cannot read {path}: its header makes no sense; save it as 16-bit PCM wav")
    if not 0 < file.getnframes() <= _LONGEST:
        raise DataError(f"{path} holds {file.getnframes():,} samples: replace or delete it")
    return file


def _decode(content: bytes, width: int) -> NDArray[np.float64]:
    """PCM bytes to values from -1 to 1; wav keeps 8 bits unsigned and all others signed, low byte first."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:
        parts = np.frombuffer(content, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(parts), 4), np.uint8)
        wide[:, 1:] = parts
        content, width = wide.tobytes(), 4
    values = np.frombuffer(content, np.dtype(f"<i{width}")).astype(np.float64)
    return values / float(2 ** (8 * width - 1))


def _resampled_length(samples: int, own: int, rate: int) -> int:
    return -(-samples * rate // own)


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
