"""Anyone's own data: a folder per class, or one .npz."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from infssm.data.dataset import ImageDataset, Indices
from infssm.data.images import ArrayImages, FileImages
from infssm.errors import DataError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"})
_KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")


def load_own(path: Path, *, name: str, max_classes: int | None = None) -> ImageDataset:
    """Load a folder or an .npz.

    Args:
        path: the folder or file.
        name: what to call the data set.
        max_classes: keep only the first classes of the sorted folders.
    """
    if path.is_file():
        return load_npz(path, name=name)
    return load_folders(path, name=name, max_classes=max_classes)


def load_npz(path: Path, *, name: str) -> ImageDataset:
    """Load ``x_train y_train x_test y_test classes``; x uint8 [n, h, w] or [n, h, w, channels], y int [n]."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            missing = [key for key in _KEYS if key not in stored.files]
            if missing:
                raise DataError(f"{path} lacks {', '.join(missing)}; it has {', '.join(stored.files)}")
            x_train, y_train, x_test, y_test, classes = (stored[key] for key in _KEYS)
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if len(x) != len(y) or y.ndim != 1:
            raise DataError(f"{path}: x_{part} {list(x.shape)} and y_{part} {list(y.shape)} do not belong together")
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
        train, train_labels = _list_files(path, "train/", classes)
        test, test_labels = _list_files(path, "test/", classes)
        labels = np.concatenate([train_labels, test_labels])
        return ImageDataset(name, classes, FileImages(path, train + test), labels, num_test=len(test))
    classes = _class_names(path, max_classes)
    files, labels = _list_files(path, "", classes)
    return ImageDataset(name, classes, FileImages(path, files), labels)


def _class_names(path: Path, max_classes: int | None) -> tuple[str, ...]:
    names = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{path} holds no class folders; expected one folder per class")
    return tuple(names[:max_classes])


def _list_files(root: Path, prefix: str, classes: tuple[str, ...]) -> tuple[tuple[str, ...], Indices]:
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        folder = root / prefix / name
        files = sorted(p.relative_to(root).as_posix() for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS)
        if not files:
            raise DataError(f"the class folder {folder} holds no images ({', '.join(sorted(EXTENSIONS))})")
        paths += files
        labels += [label] * len(files)
    return tuple(paths), np.array(labels, dtype=np.int64)
