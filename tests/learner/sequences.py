"""Streams of a second: series of three channels, sounds, bytes of text, in two domains each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from tests.data.test_audio import write_wav

TRAIN: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 4,
    "limit_batches": 3,
    "threads": 1,
    "log_every": 1,
    "accelerator": "cpu",
}
TEXT: dict[str, Any] = {"name": "mamba_lm_nano", "options": {"d_model": 16, "n_layer": 1}}
SERIES: dict[str, Any] = {"name": "mamba_nano", "options": {"d_model": 16, "n_layer": 1}}


def text_folder(root: Path) -> Path:
    """Two domains of text, with a NUL byte and bytes that are no UTF-8 among them."""
    for domain, line in (("letters", b"the quick brown fox\x00 jumps\n"), ("digits", b"3.14159 \xff\xfe 2.71828\n")):
        (root / "text" / domain).mkdir(parents=True)
        (root / "text" / domain / "one.txt").write_bytes(line * 40)
    return root / "text"


def series_file(root: Path, *, classes: int = 4) -> Path:
    """Sines of a frequency per class, 5 to 12 steps long, with a shift per domain."""
    rng = np.random.default_rng(0)
    count, time = 24 * classes, 12
    y, domain = np.arange(count) % classes, np.arange(count) // classes % 2
    steps = np.arange(time)[None, :, None]
    x = np.sin(0.4 * (1 + y)[:, None, None] * steps + np.arange(3)) + domain[:, None, None]
    x += 0.1 * rng.normal(size=x.shape)
    path = root / "waves.npz"
    np.savez(path, x=x, y=y, lengths=rng.integers(5, time + 1, count), domain=np.array(["old", "new"])[domain])
    return path


def sound_folder(root: Path) -> Path:
    """Two speakers say two words ten times each: tones of a word's and a speaker's frequency."""
    for s, speaker in enumerate(("ann", "bob")):
        for w, word in enumerate(("no", "yes")):
            for take in range(10):
                folder = root / "sounds" / speaker / word
                folder.mkdir(parents=True, exist_ok=True)
                time = np.arange(400 + 40 * take) / 8000
                wave = 16000 * np.sin(2 * np.pi * (300 + 500 * w + 100 * s) * time)
                write_wav(folder / f"{take}.wav", wave, rate=8000)
    return root / "sounds"


def config(
    source: str, out: Path, method: str = "seq", options: dict[str, Any] | None = None, **more: Any
) -> RunConfig:
    """A run of a second on one of the data above."""
    text = source.startswith("text:")
    values: dict[str, Any] = {
        "data": {"name": source, "num_tasks": 2, "by": "domain", **({"options": {"length": 16}} if text else {})},
        "model": TEXT if text else SERIES,
        "train": TRAIN,
        "method": {"name": method, **(options or {})},
        "out": str(out),
    }
    return load_config(merge(values, more))
