"""Damaged wav files: read alone, and as a folder of sounds."""

import random
import struct
import tempfile
from pathlib import Path

import numpy as np

from infssm.data import find_unreadable, in_bands, load_dataset
from infssm.data.audio import read_sound, sound_length
from tests.fuzz import Tally, attempt, conclude
from tests.fuzz._mutation import mutate


def run(count: int, seed: int) -> None:
    rng = random.Random(seed)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            content = mutate(_valid(rng), rng)
            (Path(folder) / "a").mkdir(exist_ok=True)
            path = Path(folder) / "a" / f"{number}.wav"  # a new name: what is known of a file is kept by name
            path.write_bytes(content)
            attempt(tally, f"seed {seed} case {number}: {content[:48].hex()}", lambda path=path: _read(path))
            path.unlink()
    conclude(tally, "wavs")


def _read(path: Path) -> None:
    dataset = load_dataset(str(path.parent.parent))
    bad = find_unreadable(dataset)
    length, values = sound_length(path, 8000), read_sound(path, 8000)
    assert len(values) == length
    assert np.isfinite(values).all()
    if not bad:
        in_bands(dataset, 4).sequences.sequence(0)


def _valid(rng: random.Random) -> bytes:
    """A short wav file of any kind that is read."""
    code, bits = rng.choice(((1, 8), (1, 16), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)))
    channels, rate, frames = rng.choice((1, 2, 6)), rng.choice((8000, 11025, 44100)), rng.randrange(1, 900)
    width = bits // 8
    values = np.random.default_rng(rng.getrandbits(32)).normal(0, 0.1, frames * channels)
    data = values.astype(f"<f{width}").tobytes() if code == 3 else rng.randbytes(frames * channels * width)
    form = struct.pack("<HHIIHH", code, channels, rate, rate * channels * width, channels * width, bits)
    if rng.random() < 0.2:
        guid = struct.pack("<H", code) + bytes.fromhex("000000001000800000aa00389b71")
        form = struct.pack("<H", 0xFFFE) + form[2:] + struct.pack("<HHI", 22, bits, 0) + guid
    extra = b"LIST" + struct.pack("<I", 6) + b"INFOab" if rng.random() < 0.3 else b""
    body = (
        b"WAVE" + extra + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body
