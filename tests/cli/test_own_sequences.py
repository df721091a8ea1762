"""``infssm run`` on sounds and text as people have them: it works, or the file and the fix are named first."""

from __future__ import annotations

import json
import re
import shlex
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infssm.cli.app import invoke
from tests.data.test_audio import write_float_wav, write_wav
from tests.learner.sequences import sound_folder, text_folder

SMALL = ["model.options.d_model=16", "model.options.n_layer=1", "train.epochs=1", "train.limit_batches=2"]


def go(source: str, out: Path, model: str, *more: str) -> int:
    chosen = [f"data={source}", f"model={model}", "method=seq", "train.batch_size=4", *SMALL, *more]
    return invoke(["run", *chosen, "-q", "-o", str(out)])


def beep(path: Path, *, width: int = 2, channels: int = 1) -> None:
    """A tone of 400 Hz; 8 bits are unsigned, with silence at 128."""
    tone = np.sin(2 * np.pi * 400 * np.arange(600) / 8000)
    values = 100 * tone + 128 if width == 1 else 16000 * tone
    write_wav(path, np.repeat(np.rint(values), channels), width=width, channels=channels)


GOOD: dict[str, Callable[[Path], object]] = {
    "8-bit": lambda path: beep(path, width=1),
    "24-bit": lambda path: beep(path, width=3),
    "stereo": lambda path: beep(path, channels=2),
    "float": lambda path: write_float_wav(path, [0.5] * 600),
    "other-rate": lambda path: write_wav(path, range(1500), rate=22050),
}
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-samples": (lambda path: write_wav(path, []), "holds 0 samples of 1 channels: replace it"),
    "not-finite": (lambda path: write_float_wav(path, [0.5] * 600 + [float("nan")]), "values that are not finite"),
    "text": (lambda path: path.write_text("these are words, not sounds"), "save it as 16-bit PCM wav"),
    "nothing": (lambda path: path.write_bytes(b""), "save it as 16-bit PCM wav"),
    "no-channels": (lambda path: path.write_bytes(_without_channels()), "save it as 16-bit PCM wav"),
}


def _without_channels() -> bytes:
    form = struct.pack("<HHIIHH", 1, 0, 8000, 16000, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", 4) + bytes(4)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_the_guide_makes_tasks_of_speakers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of docs/guide/speech.md, with fewer steps."""
    guide = Path(__file__).parents[2] / "docs" / "guide" / "speech.md"
    [command] = re.findall(r"^infssm (run data=domains:.*)$", guide.read_text("utf-8"), re.MULTILINE)
    for speaker in ("ann", "bob", "cleo"):
        for word in ("no", "yes"):
            for number in range(4):
                beep(tmp_path / "voices" / speaker / word / f"{number}.wav", width=2 + number % 2)
    monkeypatch.chdir(tmp_path)
    assert invoke([*shlex.split(command), *SMALL, "train.batch_size=4", "-q"]) == 0
    streams = [
        json.loads(path.read_text()) for path in tmp_path.rglob("stream.json")
    ]  # the run's and its task-0 model's
    assert streams
    assert all(stream["domains"] == ["ann", "bob", "cleo"] for stream in streams)


@pytest.mark.parametrize("kind", GOOD)
def test_sounds_of_every_kind_are_read(tmp_path: Path, kind: str) -> None:
    folder = sound_folder(tmp_path)
    GOOD[kind](folder / "bob" / "yes" / "other.wav")
    assert go(f"domains:{folder}", tmp_path / "runs", "mamba_nano", "data.bands=8") == 0
    assert list((tmp_path / "runs").rglob("result.json"))


@pytest.mark.parametrize("name", ["0.wav", "zz.wav"], ids=["first", "last"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_sounds_are_named_before_work_starts(tmp_path: Path, capfd: Any, kind: str, name: str) -> None:
    """Wherever the file is, the first of all included, whose rate the others are brought to."""
    folder = sound_folder(tmp_path)
    make, fix = BAD[kind]
    path = folder / "ann" / "no" / name
    path.unlink(missing_ok=True)
    make(path)
    source = f"domains:{folder}"
    assert go(source, tmp_path / "runs", "mamba_nano", "data.bands=8") == 3
    message = " ".join(capfd.readouterr().err.split())
    assert str(path) in message
    assert fix in message
    assert "Traceback" not in message
    assert not (tmp_path / "runs").exists()
    with pytest.warns(UserWarning, match="1 files cannot be read"):
        assert go(source, tmp_path / "runs", "mamba_nano", "data.bands=8", "data.skip_unreadable=true") == 0


def test_text_of_any_bytes_is_read(tmp_path: Path) -> None:
    """NUL bytes and bytes that are no UTF-8 are bytes like others."""
    assert go(f"text:{text_folder(tmp_path)}", tmp_path / "runs", "mamba_lm_nano", "data.options.length=16") == 0
    assert list((tmp_path / "runs").rglob("result.json"))


def test_text_that_a_tokenizer_cannot_read_is_named(tmp_path: Path, capfd: Any) -> None:
    """A tokenizer reads characters: of bytes that are none it would make something else without a word."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    options = ["data.options.length=4", f"data.options.tokenizer={tmp_path / 'words.json'}"]
    source = f"text:{text_folder(tmp_path)}"
    assert go(source, tmp_path / "runs", "mamba_lm_nano", *options) == 3
    message = "".join(capfd.readouterr().err.split())
    assert str(tmp_path / "text" / "digits" / "one.txt") in message
    assert "UTF-8" in message
    assert not (tmp_path / "runs").exists()
