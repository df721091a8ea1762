"""Anyone's own data: a folder per class, or one .npz."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from infssm.data.dataset import Dataset, ImageDataset, Indices
from infssm.data.images import EXTENSIONS, ArrayImages, FileImages
from infssm.data.npz import npz_names, read_npz
from infssm.data.sets.series import load_series
from infssm.data.sets.sounds import load_sounds
from infssm.errors import DataError

_KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")


def load_own(path: Path, *, name: str, max_classes: int | None = None) -> Dataset:
    """Load a folder of images or sounds, or an .npz of images or series; its split will be stratified.

    Args:
        path: the folder or file.
        name: what to call the data set.
        max_classes: keep only the first classes of the sorted folders.
    """
    if path.is_file():
        if "x" in npz_names(path):
            return load_series(path, name=name)
        return replace(load_npz(path, name=name), stratified=True)
    if any(path.glob("*/*.wav")) or any(path.glob("train/*/*.wav")):
        return load_sounds(path, name=name)
    return replace(load_folders(path, name=name, max_classes=max_classes), stratified=True)


def load_npz(path: Path, *, name: str) -> ImageDataset:
    """Load ``x_train y_train x_test y_test classes``; x uint8 [n, h, w] or [n, h, w, channels], y int [n]."""
    stored = read_npz(path, _KEYS)
    x_train, y_train, x_test, y_test, classes = (stored[key] for key in _KEYS)
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim < 1 or y.ndim != 1 or len(x) != len(y):
            raise DataError(f"{path}: x_{part} {list(x.shape)} and y_{part} {list(y.shape)} do not belong together")
    if classes.ndim != 1:
        raise DataError(f"{path}: classes must be a list of names, got {list(classes.shape)}")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{path}: train images {list(x_train.shape[1:])}, test images {list(x_test.shape[1:])}")
    return ImageDataset(
        name,
        tuple(str(c) for c in classes),
        ArrayImages.from_numpy(np.concatenate([x_train, x_test])),
        np.concatenate([y_train, y_test]),
        num_test=len(y_test),
    )


def load_folders(path: Path, *, name: str, max_classes: int | None = None) -> ImageDataset:
    """Load one folder per class, or ``train/`` and ``test/`` each with one folder per class.

    Classes are the sorted folder names, files are sorted within a class, as torchvision's ImageFolder does.
    """
    if (path / "train").is_dir() and (path / "test").is_dir():
        classes = _class_names(path / "train", max_classes)
        test_classes = _class_names(path / "test", max_classes)
        if classes != test_classes:
            differing = sorted(set(classes) ^ set(test_classes))[:5]
            raise DataError(f"{path}: train/ and test/ hold different classes: {', '.join(differing)}")
        train, test = _list_files(path, "train/", classes), _list_files(path, "test/", classes)
        classes = _not_empty(path, classes, train, test)
        (paths, labels), (test_paths, test_labels) = _flatten(classes, train), _flatten(classes, test)
        images = FileImages(path, paths + test_paths)
        return ImageDataset(name, classes, images, np.concatenate([labels, test_labels]), num_test=len(test_paths))
    classes = _class_names(path, max_classes)
    files = _list_files(path, "", classes)
    classes = _not_empty(path, classes, files)
    paths, labels = _flatten(classes, files)
    return ImageDataset(name, classes, FileImages(path, paths), labels)


def _class_names(path: Path, max_classes: int | None) -> tuple[str, ...]:
    names = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{path} holds no class folders; expected one folder per class")
    return tuple(names[:max_classes])


def _list_files(root: Path, prefix: str, classes: tuple[str, ...]) -> dict[str, list[str]]:
    """Image files of each class, sorted, relative to ``root``."""
    return {
        name: sorted(
            file.relative_to(root).as_posix()
            for file in (root / prefix / name).rglob("*")
            if file.suffix.lower() in EXTENSIONS
        )
        for name in classes
    }


def _not_empty(path: Path, classes: tuple[str, ...], *parts: dict[str, list[str]]) -> tuple[str, ...]:
    """The classes that have images; the others are left out with a warning."""
    empty = [name for name in classes if not any(files[name] for files in parts)]
    if len(empty) == len(classes):
        raise DataError(f"no class folder of {path} holds images ({', '.join(sorted(EXTENSIONS))})")
    if empty:
        shown = ", ".join(empty[:5]) + (" and more" if len(empty) > 5 else "")
        warnings.warn(
            f"{path}: {len(empty)} class folders hold no images and are left out: {shown}", UserWarning, stacklevel=3
        )
    return tuple(name for name in classes if name not in empty)


def _flatten(classes: tuple[str, ...], files: dict[str, list[str]]) -> tuple[tuple[str, ...], Indices]:
    """Paths class after class, and their labels int64 [n]."""
    paths = tuple(path for name in classes for path in files[name])
    return paths, np.repeat(np.arange(len(classes)), [len(files[name]) for name in classes])
