"""Folders of your own: sounds, a folder per class; images or sounds, a folder per domain with a folder per class."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from infssm.data.audio import wav_rate
from infssm.data.dataset import Dataset
from infssm.data.images import EXTENSIONS, FileImages
from infssm.data.sequences import WavFiles
from infssm.errors import DataError

_Found = list[tuple[str, str, str]]
"""Domain, class and path of each file."""


def load_sounds(path: Path, *, name: str) -> Dataset:
    """One folder of wav files per class, or ``train/`` and ``test/`` each with one folder per class."""
    if (path / "train").is_dir() and (path / "test").is_dir():
        train, test = _files(path, "train/", domains=False), _files(path, "test/", domains=False)
        return _dataset(path, name, train + test, num_test=len(test))
    return _dataset(path, name, _files(path, "", domains=False))


def load_domains(path: Path) -> Dataset:
    """A folder per domain, in each a folder per class, in each image or wav files."""
    if not path.is_dir():
        raise DataError(f"no folder {path}: give one with a folder per domain, and in each a folder per class")
    return _dataset(path, path.name, _files(path, "", domains=True))


def _files(root: Path, prefix: str, *, domains: bool) -> _Found:
    """All files below ``root/prefix``, sorted."""
    pattern = "*/*/*" if domains else "*/*"
    found = []
    for file in sorted((root / prefix).glob(pattern)):
        if file.suffix.lower() in EXTENSIONS | {".wav"}:
            place = file.relative_to(root / prefix).parts
            found.append((place[0] if domains else "", place[-2], file.relative_to(root).as_posix()))
    if not found:
        raise DataError(f"{root / prefix} holds no image or wav files as {pattern}: folders, then files")
    return found


def _dataset(root: Path, name: str, found: _Found, num_test: int = 0) -> Dataset:
    paths = tuple(path for _, _, path in found)
    sounds = sum(path.lower().endswith(".wav") for path in paths)
    if sounds not in (0, len(paths)):
        raise DataError(f"{root} holds {sounds} wav files and {len(paths) - sounds} images: keep one kind")
    classes, domains = sorted({label for _, label, _ in found}), sorted({domain for domain, _, _ in found})
    return Dataset(
        name,
        tuple(classes),
        WavFiles(root, paths, _rate(root, paths)) if sounds else FileImages(root, paths),
        np.array([classes.index(label) for _, label, _ in found]),
        num_test=num_test,
        stratified=True,
        domains=() if domains == [""] else tuple(domains),
        domain_of=None if domains == [""] else np.array([domains.index(domain) for domain, _, _ in found]),
    )


def _rate(root: Path, paths: tuple[str, ...]) -> int:
    """Samples per second of the first file that can be read, which all are brought to."""
    for path in paths:
        with suppress(DataError):
            return wav_rate(root / path)
    return wav_rate(root / paths[0])  # says what is wrong
