"""Wav files good and bad: what a user expects of each."""

import struct
import sys
import wave
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from infssm.data import check, find_unreadable, load_dataset
from infssm.data.audio import read_sound, sound_length
from infssm.errors import DataError


def write_wav(path, values, *, rate=8000, width=2, channels=1):
    """Integers of ``width`` bytes, frame by frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        signed = width > 1
        file.writeframes(b"".join(int(v).to_bytes(width, "little", signed=signed) for v in values))
    return path


def write_float_wav(path, values, *, width=4, code=3, rate=8000, extensible=False):
    data = np.asarray(values, f"<f{width}").tobytes()
    form = struct.pack("<HHIIHH", code, 1, rate, width * rate % 2**32, width, 8 * width)
    if extensible:
        form = struct.pack("<H", 0xFFFE) + form[2:] + struct.pack("<HHIH", 22, 8 * width, 0, code) + bytes(14)
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    return path


@pytest.mark.parametrize(
    ("width", "values", "expected"),
    [
        (1, [0, 128, 255], [-1, 0, 127 / 128]),
        (2, [-32768, 0, 16384], [-1, 0, 0.5]),
        (3, [-(2**23), 1, 2**22], [-1, 2**-23, 0.5]),
        (4, [-(2**31), 0, 2**30], [-1, 0, 0.5]),
    ],
)
def test_all_widths_of_pcm(tmp_path, width, values, expected):
    path = write_wav(tmp_path / "a.wav", values, width=width)
    read = read_sound(path, 8000)
    assert read.dtype == np.float32
    assert read.tolist() == expected
    assert sound_length(path, 8000) == 3


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("extensible", [False, True])
def test_floating_point_wav(tmp_path, width, extensible):
    path = write_float_wav(tmp_path / "a.wav", [0.5, -0.25, 1.5], width=width, extensible=extensible)
    assert read_sound(path, 8000).tolist() == [0.5, -0.25, 1.5]


class Flac:
    """What soundfile offers of a file, for machines without it."""

    frames, channels, samplerate = 2, 2, 8000

    def __init__(self, path):
        if Path(path).read_bytes() != b"fLaC":
            raise RuntimeError("unknown format")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, dtype, always_2d):
        assert (dtype, always_2d) == ("float64", True)
        return np.array([[0.5, 0.25], [1, 1]])


def test_flac_is_read_by_soundfile_or_named(tmp_path, monkeypatch):
    for name, content in (
        ("yes/1.flac", b"fLaC"),
        ("yes/2.flac", b"fLaC"),
        ("no/3.FLAC", b"fLaC"),
        ("no/4.flac", b"no"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr("infssm.data.sets.own.find_spec", lambda _: None)
    with (
        pytest.warns(UserWarning, match=r"left out 4 flac files \(pip install soundfile to read them\): no/3\.FLAC, "),
        pytest.raises(DataError, match="holds images or sounds"),
    ):
        load_dataset(str(tmp_path))
    monkeypatch.undo()
    module = ModuleType("soundfile")
    module.SoundFile, module.__spec__ = Flac, ModuleSpec("soundfile", None)
    monkeypatch.setitem(sys.modules, "soundfile", module)
    dataset = load_dataset(str(tmp_path))
    assert dataset.sequences.sequence(2)[:, 0].tolist() == [0.375, 1]
    [(index, reason)] = find_unreadable(dataset).items()
    assert (dataset.sequences.paths[index], "unknown format" in reason) == ("no/4.flac", True)


def test_channels_are_averaged(tmp_path):
    path = write_wav(tmp_path / "a.wav", [16384, -16384, 16384, 16384], channels=2)
    assert read_sound(path, 8000).tolist() == [0, 0.5]


@pytest.mark.parametrize(("own", "samples"), [(16000, 3201), (44100, 4410), (11025, 1000), (4000, 777)])
def test_other_rates_are_resampled(tmp_path, own, samples):
    """A tone of 440 Hz is one at any rate, away from the ends."""
    tone = 16000 * np.sin(2 * np.pi * 440 * np.arange(samples) / own)
    path = write_wav(tmp_path / "a.wav", np.rint(tone), rate=own)
    read = read_sound(path, 8000)
    assert len(read) == sound_length(path, 8000) == -(-samples * 8000 // own)
    expected = 16000 / 32768 * np.sin(2 * np.pi * 440 * np.arange(len(read)) / 8000)
    middle = slice(100, -100)
    assert np.abs(read[middle] - expected[middle]).max() < 0.01


def test_bad_files_are_refused_in_words(tmp_path):
    good = write_wav(tmp_path / "good.wav", range(500))
    cases = {
        "empty.wav": (b"", "save it as 16-bit PCM wav"),
        "text.wav": (b"these are words, not sounds", "save it as 16-bit PCM wav"),
        "cut.wav": (good.read_bytes()[:500], "is cut short"),
        "header.wav": (good.read_bytes()[:30], "save it as 16-bit PCM wav"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            read_sound(tmp_path / name, 8000)
        assert name in str(caught.value)
    with pytest.raises(DataError, match=r"compressed \(wav format 85\); save it as 16-bit PCM"):
        read_sound(write_float_wav(tmp_path / "mp3.wav", [0.5], code=85), 8000)
    with pytest.raises(DataError, match="not finite"):
        read_sound(write_float_wav(tmp_path / "nan.wav", [0.5, np.nan]), 8000)
    with pytest.raises(DataError, match="claims 2,147,483,647 samples per second"):  # its filter would take 320 GiB
        read_sound(write_float_wav(tmp_path / "rate.wav", [0.5], rate=2**31 - 1), 8000)
    with pytest.raises(DataError, match="7 samples per second, which cannot be converted to 8,000"):
        sound_length(write_float_wav(tmp_path / "slow.wav", [0.5], rate=7), 8000)
    with pytest.raises(DataError, match="holds 0 samples"):
        sound_length(write_wav(tmp_path / "none.wav", []), 8000)
    with pytest.raises(DataError, match="cannot read"):
        sound_length(tmp_path / "absent.wav", 8000)


def test_a_folder_of_sounds_per_class(tmp_path):
    for name, length in (("yes", 40), ("no", 70)):
        for number in range(5):
            write_wav(tmp_path / "words" / name / f"{number}.wav", range(length + number), rate=4000)
    dataset = load_dataset(str(tmp_path / "words"))
    assert dataset.classes == ("no", "yes")
    assert (dataset.sequences.kind, dataset.sequences.width, dataset.sequences.rate) == ("audio", 1, 4000)
    assert dataset.sequences.lengths.tolist() == [70, 71, 72, 73, 74, 40, 41, 42, 43, 44]
    assert dataset.sequences.sequence(5).shape == (40, 1)
    (tmp_path / "words" / "no" / "3.wav").write_bytes(b"noise")
    assert list(find_unreadable(load_dataset(str(tmp_path / "words")))) == [3]
    assert [path for path, _ in check(str(tmp_path / "words")).unreadable] == ["no/3.wav"]
