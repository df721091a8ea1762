"""Spoken digits (Free Spoken Digit Dataset): six speakers say ten digits fifty times each, 8 kHz."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from infssm.data.dataset import Dataset
from infssm.data.registry import Archive, find_layout, register_dataset
from infssm.data.sequences import SoundFiles
from infssm.errors import DataError

RATE = 8000
_NAME = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav")
_TEST = 5
"""Recordings 0 to 4 of every speaker and digit are the test set: the authors' rule."""


@register_dataset(
    "speech-digits",
    summary="spoken digits: 3,000 recordings of 6 speakers, 8 kHz (FSDD, CC BY-SA 4.0)",
    classes=10,
    images=3000,
    archives=(
        Archive(
            url="https://github.com/Jakobovski/free-spoken-digit-dataset/archive/refs/tags/v1.0.10.tar.gz",
            file="fsdd.tar.gz",
            creates="recordings",
            place="fsdd",
        ),
    ),
)
def speech_digits(root: Path) -> Dataset:
    """Digits are the classes, speakers the domains."""
    candidates = ("fsdd", "fsdd/recordings", "free-spoken-digit-dataset/recordings", "recordings")
    folder = find_layout("speech-digits", root, candidates, what="spoken digits")
    if (folder / "recordings").is_dir():
        folder = folder / "recordings"
    recordings = [(m, path.name) for path in sorted(folder.glob("*.wav")) if (m := _NAME.fullmatch(path.name))]
    if not recordings:
        raise DataError(f"{folder} holds no recordings such as 7_jackson_32.wav")
    recordings.sort(key=lambda item: (int(item[0][3]) < _TEST, item[1]))
    speakers = tuple(sorted({match[2] for match, _ in recordings}))
    return Dataset(
        "speech-digits",
        tuple("0123456789"),
        SoundFiles(folder, tuple(name for _, name in recordings), RATE),
        np.array([int(match[1]) for match, _ in recordings]),
        num_test=sum(int(match[3]) < _TEST for match, _ in recordings),
        stratified=True,
        domains=speakers,
        domain_word="speaker",
        domain_of=np.array([speakers.index(match[2]) for match, _ in recordings]),
    )
