"""Your own data: a folder of images or sounds per class, the same per domain, or one .npz of images or series."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from infssm.data import audio, images
from infssm.data.audio import sound_rate
from infssm.data.dataset import Dataset, Indices
from infssm.data.files import scan, shown, walk
from infssm.data.images import ArrayImages, FileImages
from infssm.data.npz import npz_names, read_npz
from infssm.data.sequences import ArraySequences, SoundFiles
from infssm.errors import DataError, MissingDataError

_KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")
_Found = dict[tuple[str, str], list[str]]
"""Paths of the files of each domain (empty without domains) and class."""
_OPTIONAL = (
    (images.HEIC, "pillow_heif", f"HEIC images ({images.HEIC_INSTALL} to read them)"),
    (frozenset({".flac"}), "soundfile", f"flac files ({audio.FLAC} to read them)"),
)


def load_own(path: Path, *, name: str, max_classes: int | None = None) -> Dataset:
    """Load a folder of images or sounds, or an .npz of images or series; its split will be stratified.

    Args:
        path: the folder or file.
        name: what to call the data set.
        max_classes: keep only the first classes of the sorted folders.
    """
    if not path.is_file():
        return load_folders(path, name=name, max_classes=max_classes, stratified=True)
    if "x" in npz_names(path):
        return load_series(path, name=name)
    return load_npz(path, name=name, stratified=True)


def load_npz(path: Path, *, name: str, stratified: bool = False) -> Dataset:
    """Load ``x_train y_train x_test y_test classes``; x uint8 [n, h, w] or [n, h, w, channels], y int [n]."""
    stored = read_npz(path, _KEYS)
    x_train, y_train, x_test, y_test, classes = (stored[key] for key in _KEYS)
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim < 1 or y.ndim != 1 or len(x) != len(y):
            raise DataError(f"{path}: x_{part} {list(x.shape)} and y_{part} {list(y.shape)} do not belong together")
        if not np.issubdtype(y.dtype, np.integer):
            raise DataError(f"{path}: labels must be integers, got {y.dtype} in y_{part}")
    pixels = [ArrayImages.from_numpy(x).pixels for x in (x_train, x_test)]
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{path}: train images {list(x_train.shape[1:])}, test images {list(x_test.shape[1:])}")
    return Dataset(
        name,
        _names(path, classes),
        ArrayImages(torch.cat(pixels)),
        np.concatenate([y_train.astype(np.int64), y_test.astype(np.int64)]),
        num_test=len(y_test),
        stratified=stratified,
    )


def load_series(path: Path, *, name: str) -> Dataset:
    """Load ``x`` [n, time, channels] and ``y`` int [n]; further columns may be there.

    ``lengths`` int [n]: steps that count; the rest of a series is padding. ``classes``: names. ``domain`` [n]: numbers
    or names (a speaker, a year), of which tasks can be made. ``test`` bool [n]: which are the test set.
    """
    stored = read_npz(path, ("x", "y"), ("lengths", "classes", "domain", "test"))
    x, y = stored["x"], stored["y"]
    for key in ("y", "lengths", "domain", "test"):
        if key in stored and (x.ndim < 1 or stored[key].shape != x.shape[:1]):
            raise DataError(f"{path}: x {list(x.shape)} and {key} {list(stored[key].shape)} do not belong together")
    if not np.issubdtype(y.dtype, np.integer) or not len(y):
        raise DataError(f"{path}: y must be integers, one per series, got {y.dtype} {list(y.shape)}")
    if "classes" in stored:
        classes = _names(path, stored["classes"])
    elif y.max() >= len(y):  # every label from 0 needs a series, so this cannot be; a label may be a timestamp
        raise DataError(
            f"{path}: {len(y)} series with labels up to {y.max()}, but labels must count classes from 0: save y as "
            "np.unique(y, return_inverse=True)[1]"
        )
    else:
        classes = tuple(map(str, range(int(y.max()) + 1)))
    test = stored.get("test", np.zeros(len(y), dtype=bool))
    if not (test.dtype == bool or np.issubdtype(test.dtype, np.integer)):
        raise DataError(f"{path}: test must be true or false for each series, got {test.dtype}")
    order = np.argsort(test.astype(bool), kind="stable")
    domains: tuple[str, ...] = ()
    domain_of = None
    if "domain" in stored:
        if stored["domain"].dtype.kind not in "biufSU":
            raise DataError(f"{path}: domain must hold numbers or names, got {stored['domain'].dtype}")
        values, numbers = np.unique(stored["domain"][order], return_inverse=True)
        domains, domain_of = tuple(map(str, values)), numbers.reshape(-1)
    return Dataset(
        name,
        classes,
        ArraySequences(x[order], stored["lengths"][order] if "lengths" in stored else None),
        y[order].astype(np.int64),
        num_test=int(test.astype(bool).sum()),
        stratified=True,
        domains=domains,
        domain_of=domain_of,
    )


def _names(path: Path, classes: NDArray[Any]) -> tuple[str, ...]:
    if classes.ndim != 1 or classes.dtype.kind not in "biufSU":
        raise DataError(f"{path}: classes must be a list of names, got {classes.dtype} {list(classes.shape)}")
    return tuple(map(str, classes))


def load_folders(path: Path, *, name: str, max_classes: int | None = None, stratified: bool = False) -> Dataset:
    """Load one folder of images or sounds per class, or ``train/`` and ``test/`` each with one folder per class.

    Classes are the sorted folder names, files are sorted within a class, as torchvision's ImageFolder does.
    """
    folders = _class_names(path, None)
    if not {"train", "test"} <= set(folders):
        return _dataset(path, name, [_files(path, "", folders[:max_classes])], stratified=stratified)
    classes, test_classes = (_class_names(path / part, max_classes) for part in ("train", "test"))
    if classes != test_classes:
        raise DataError(
            f"{path}: train/ and test/ hold different classes: {shown(sorted(set(classes) ^ set(test_classes)))}"
        )
    parts = [_files(path, f"{part}/", classes) for part in ("train", "test")]
    return _dataset(path, name, parts, stratified=stratified)


def load_domains(path: Path) -> Dataset:
    """A folder per domain, in each a folder per class, in each image or sound files."""
    if not path.is_dir():
        raise MissingDataError(f"no folder {path}: give one with a folder per domain, and in each a folder per class")
    found: _Found = {}
    for domain in _class_names(path, None):
        classes = _class_names(path / domain, None)
        found |= {(domain, label): files for (_, label), files in _files(path, f"{domain}/", classes).items()}
    return _dataset(path, path.name, [found], stratified=True)


def _class_names(path: Path, limit: int | None) -> list[str]:
    names = [name for name in scan(path)[0] if not name.startswith(".")]
    if not names:
        raise DataError(f"{path} holds no class folders; expected one folder per class")
    return names[:limit]


def _files(root: Path, prefix: str, classes: Iterable[str]) -> _Found:
    """Image and sound files of each class, sorted, relative to ``root``."""
    found: _Found = {}
    for name in classes:
        files = (f"{prefix}{name}/{file}" for file in walk(root / prefix / name))
        found["", name] = sorted(file for file in files if _suffix(file) in images.SUFFIXES | audio.SUFFIXES)
    return found


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


def _dataset(root: Path, name: str, parts: Sequence[_Found], *, stratified: bool) -> Dataset:
    """A data set of one part, or of a training and a test part; classes without files are left out with a warning."""
    _leave_out_unsupported(root, parts)
    kept = {label for part in parts for (_, label), files in part.items() if files}
    empty = sorted({label for part in parts for _, label in part} - kept)
    if not kept:
        known = ", ".join(sorted(images.SUFFIXES | audio.SUFFIXES))
        raise DataError(f"no class folder of {root} holds images or sounds ({known})")
    if empty:
        warnings.warn(
            f"{root}: {len(empty)} class folders hold no images or sounds and are left out: {shown(empty)}",
            UserWarning,
            stacklevel=4,
        )
    found = [(*key, path) for part in parts for key, files in part.items() for path in files]
    paths = tuple(path for _, _, path in found)
    sounds = sum(_suffix(path) in audio.SUFFIXES for path in paths)
    if sounds not in (0, len(paths)):
        raise DataError(f"{root} holds {sounds} sounds and {len(paths) - sounds} images: keep one kind")
    classes, domains = sorted(kept), sorted({domain for domain, _, _ in found})
    return Dataset(
        name,
        tuple(classes),
        SoundFiles(root, paths, _rate(root, paths)) if sounds else FileImages(root, paths),
        _numbers(classes, (label for _, label, _ in found)),
        num_test=sum(map(len, parts[1].values())) if len(parts) > 1 else 0,
        stratified=stratified or bool(sounds),
        domains=() if domains == [""] else tuple(domains),
        domain_of=None if domains == [""] else _numbers(domains, (domain for domain, _, _ in found)),
    )


def _leave_out_unsupported(root: Path, parts: Sequence[_Found]) -> None:
    """Remove files of a format whose library is not installed, with a warning that names them."""
    for suffixes, library, description in _OPTIONAL:
        if find_spec(library) is not None:
            continue
        skipped: list[str] = []
        for part in parts:
            for key, files in part.items():
                skipped += [path for path in files if _suffix(path) in suffixes]
                part[key] = [path for path in files if _suffix(path) not in suffixes]
        if skipped:
            warnings.warn(f"{root}: left out {len(skipped)} {description}: {shown(skipped)}", UserWarning, stacklevel=5)


def _rate(root: Path, paths: Sequence[str]) -> int:
    """Samples per second of the first file that can be read; all others are converted to it."""
    for path in paths:
        with suppress(DataError):
            return sound_rate(root / path)
    return sound_rate(root / paths[0])  # raises the reason


def _numbers(names: Sequence[str], values: Iterable[str]) -> Indices:
    """The position in ``names`` of each value: int64 [n]."""
    number = {name: position for position, name in enumerate(names)}
    return np.array([number[value] for value in values], dtype=np.int64)
