"""Your own data: a folder per class, the same per domain, one .npz, or a data set of the ``datasets`` library."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infssm._optional import require
from infssm.data import audio, images
from infssm.data.audio import sound_rate
from infssm.data.dataset import Dataset, Indices
from infssm.data.files import digest, scan, shown, walk
from infssm.data.images import ArrayImages, FileImages, ImageFacts, to_raw, to_rgb
from infssm.data.npz import npz_names, read_npz
from infssm.data.sequences import ArraySequences, MeasuredSeries, SoundFiles
from infssm.data.sets.text import Text, one_line, text_dataset
from infssm.errors import ConfigError, DataError, InfssmError, MissingDataError

if TYPE_CHECKING:
    from PIL.Image import Image

_KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")
_OPTIONAL = (
    (images.HEIC, "pillow_heif", f"HEIC images ({images.HEIC_INSTALL} to read them)"),
    (frozenset({".flac"}), "soundfile", f"flac files ({audio.FLAC} to read them)"),
)


class _Folder(NamedTuple):
    """A folder of files of one class: its path below the data set, and what its files are."""

    path: str
    label: str
    domain: str = ""
    test: bool = False


def load_own(path: Path, *, name: str, max_classes: int | None = None) -> Dataset:
    """Load a folder of images or sounds, or an .npz of images or series; its split will be stratified.

    ``max_classes`` keeps only the first of the sorted folders.
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
    or names (a speaker, a year), of which tasks can be made. ``test`` bool [n]: which are the test set. ``target`` [n]
    in the place of ``y`` and ``classes``: numbers to predict, with a ``domain``.
    """
    if measured := "target" in npz_names(path):
        stored = read_npz(path, ("x", "target", "domain"), ("lengths", "test"))
        stored |= {"y": np.zeros(len(stored["target"]), dtype=np.int64), "classes": np.array(["target"])}
    else:
        stored = read_npz(path, ("x", "y"), ("lengths", "classes", "domain", "test"))
    x, y = stored["x"], stored["y"]
    for key in ("y", "target", "lengths", "domain", "test"):
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
    domains: Any = ()
    domain_of = None
    if "domain" in stored:
        if stored["domain"].dtype.kind not in "biufSU":
            raise DataError(f"{path}: domain must hold numbers or names, got {stored['domain'].dtype}")
        domains, domain_of = np.unique(stored["domain"][order], return_inverse=True)
    lengths = stored["lengths"][order] if "lengths" in stored else None
    if measured and stored["target"].dtype.kind not in "biuf":
        raise DataError(f"{path}: target must hold numbers, got {stored['target'].dtype}")
    return Dataset(
        name,
        classes,
        MeasuredSeries(x[order], stored["target"][order], lengths) if measured else ArraySequences(x[order], lengths),
        y[order].astype(np.int64),
        num_test=int(test.astype(bool).sum()),
        stratified=True,
        domains=tuple(map(str, domains)),
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
    names = _subfolders(path)
    if not {"train", "test"} <= set(names):
        folders = [_Folder(label, label) for label in names[:max_classes]]
    else:
        classes, test_classes = (_subfolders(path / part)[:max_classes] for part in ("train", "test"))
        if classes != test_classes:
            differing = shown(sorted(set(classes) ^ set(test_classes)))
            raise DataError(f"{path}: train/ and test/ hold different classes: {differing}")
        folders = [_Folder(f"{part}/{c}", c, test=part == "test") for part in ("train", "test") for c in classes]
    return _dataset(path, name, folders, stratified=stratified)


def load_domains(path: Path) -> Dataset:
    """A folder per domain, in each a folder per class, in each image or sound files."""
    if not path.is_dir():
        raise MissingDataError(f"no folder {path}: give one with a folder per domain, and in each a folder per class")
    folders = [_Folder(f"{d}/{c}", c, domain=d) for d in _subfolders(path) for c in _subfolders(path / d)]
    return _dataset(path, path.name, folders, stratified=True)


def _subfolders(path: Path) -> list[str]:
    names = [name for name in scan(path)[0] if not name.startswith(".")]
    if not names:
        raise DataError(f"{path} holds no class folders; expected one folder per class")
    return names


def _dataset(root: Path, name: str, folders: Sequence[_Folder], *, stratified: bool) -> Dataset:
    """A data set of the images or sounds in the folders.

    Classes without files, and files of a format whose library is not installed, are left out with a warning.
    """
    known = images.SUFFIXES | audio.SUFFIXES
    files = [(folder, f"{folder.path}/{file}") for folder in folders for file in sorted(walk(root / folder.path))]
    files = [(folder, path) for folder, path in files if _suffix(path) in known]
    for suffixes, library, description in _OPTIONAL:
        skipped = [path for _, path in files if _suffix(path) in suffixes] if find_spec(library) is None else []
        if skipped:
            warnings.warn(f"{root}: left out {len(skipped)} {description}: {shown(skipped)}", UserWarning, stacklevel=4)
            files = [(folder, path) for folder, path in files if _suffix(path) not in suffixes]
    if not files:
        raise DataError(f"no class folder of {root} holds images or sounds ({', '.join(sorted(known))})")
    classes, domains = (sorted({getattr(folder, key) for folder, _ in files}) for key in ("label", "domain"))
    if empty := sorted({folder.label for folder in folders} - set(classes)):
        warnings.warn(
            f"{root}: {len(empty)} class folders hold no images or sounds and are left out: {shown(empty)}",
            UserWarning,
            stacklevel=4,
        )
    paths = tuple(path for _, path in files)
    sounds = [path for path in paths if _suffix(path) in audio.SUFFIXES]
    if len(sounds) not in (0, len(paths)):
        raise DataError(f"{root} holds {len(sounds)} sounds and {len(paths) - len(sounds)} images: keep one kind")
    return Dataset(
        name,
        tuple(classes),
        SoundFiles(root, paths, _rate(root, paths)) if sounds else FileImages(root, paths),
        _numbers(classes, (folder.label for folder, _ in files)),
        num_test=sum(folder.test for folder, _ in files),
        stratified=stratified or bool(sounds),
        domains=() if domains == [""] else tuple(domains),
        domain_of=None if domains == [""] else _numbers(domains, (folder.domain for folder, _ in files)),
    )


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


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


class TableImages:
    """Images of a column of tables, one table after the other, decoded when asked for.

    Args:
        tables: tables of the ``datasets`` library.
        column: which holds images.
    """

    def __init__(self, tables: Sequence[Any], column: str) -> None:
        self._tables = tuple(tables)
        self._column = column
        self._ends = np.cumsum([len(table) for table in self._tables])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def pil(self, index: int, at_least: int | None = None) -> Image:  # noqa: ARG002 - the library decodes whole images
        """Image ``index`` as an RGB PIL image; DataError if it cannot be read."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        table = self._tables[number]
        try:
            return to_rgb(table[int(index - (self._ends[number] - len(table)))][self._column])
        except Exception as error:  # whatever datasets, pyarrow and Pillow raise on damaged files
            raise DataError(f"cannot read image {index} of column {self._column!r}: {one_line(error)}") from error

    def raw(self, indices: Sequence[int], size: int) -> Tensor:
        """Images with the short side resized to ``size``, cut to the central square: uint8 [n, 3, size, size]."""
        return torch.stack([to_raw(self.pil(int(index)), size) for index in indices])

    def facts(self, name: str) -> ImageFacts:
        """See :class:`~infssm.data.images.Images`; images may have any size and are read as RGB."""
        return ImageFacts(name, 3)

    def fingerprint(self) -> str:
        """Digest of the tables' own."""
        prints = [self._column, *(str(table._fingerprint) for table in self._tables)]
        return digest(["\n".join(prints)])


def load_hub(
    name: str,
    *,
    image: str | None = None,
    label: str | None = None,
    text: str | None = None,
    domain: str | None = None,
    length: int = 256,
    tokenizer: str | None = None,
) -> Dataset:
    """Load a data set of images with labels, or of text with domains.

    The part ``test`` of the data set (else ``validation``) is the test data; only ``train`` is divided further.

    Args:
        name: a name on the hub, or a folder written by ``save_to_disk``.
        image: column of images; the only one of that type unless given.
        label: column of class labels; likewise.
        text: column of text, if there are no images.
        domain: column whose values are domains; text without one has a single domain.
        length: tokens per sample of text.
        tokenizer: see :func:`~infssm.data.sets.text.text_folder`.
    """
    tables = _parts(name)
    features, title = tables[0].features, Path(name).name
    is_text = text is not None or not _of_type(features, "Image")
    wanted = [(text, "Value", "text")] if is_text else [(image, "Image", "image"), (label, "ClassLabel", "label")]
    columns = []
    for column, kind, option in wanted:
        there = _of_type(features, kind)
        if column is None and len(there) != 1:
            raise ConfigError(
                f"{name!r} has {len(there)} columns of type {kind}: choose one with data.options.{option}"
            )
        if column is not None and column not in there:
            raise ConfigError(f"{name!r} has no column {column!r} of type {kind}; it has {', '.join(there) or 'none'}")
        columns.append(column or there[0])
    for table in tables:
        for column in [*columns, domain] if domain else columns:
            if column not in table.features:
                raise ConfigError(f"{name!r} has no column {column!r}; it has {', '.join(table.features)}")
    try:
        if is_text:
            texts = (
                Text(
                    str(row[domain]) if domain else "text",
                    str(row[columns[0]]).encode("utf-8", "replace"),
                    f"a row of {name}",
                    bool(test),
                )
                for test, table in enumerate(tables)
                for row in table.select_columns([*columns, domain] if domain else columns)
                if row[columns[0]] is not None
            )
            dataset = text_dataset(title, texts, length=length, tokenizer=tokenizer)
            return replace(dataset, domain_word=domain or "domain")
        domains: Any = ()
        domain_of = None
        if domain:
            values = np.concatenate([np.asarray(table[domain]).astype(str) for table in tables])
            domains, domain_of = np.unique(values, return_inverse=True)
        return Dataset(
            title,
            tuple(features[columns[1]].names),
            TableImages(tables, columns[0]),
            np.concatenate([np.asarray(table[columns[1]]) for table in tables]),
            num_test=len(tables[1]) if len(tables) > 1 else 0,
            stratified=True,
            domains=tuple(map(str, domains)),
            domain_of=domain_of,
            domain_word=domain or "domain",
        )
    except InfssmError:
        raise
    except Exception as error:  # damaged tables raise errors of pyarrow, or almost any other
        raise DataError(f"cannot read {name!r} with the datasets library: {one_line(error)}") from error


def _parts(name: str) -> list[Any]:
    """The training table, and the test (else the validation) table where there is one."""
    datasets: Any = require("datasets", install="data=hf:... needs it: pip install 'infssm[hf]'")
    folder = Path(name).expanduser()
    try:
        parts: Any = datasets.load_from_disk(str(folder)) if folder.is_dir() else datasets.load_dataset(name)
    except Exception as error:
        raise DataError(f"cannot load {name!r} with the datasets library: {one_line(error)}") from error
    if not isinstance(parts, datasets.DatasetDict):
        return [parts]
    if "train" not in parts:
        raise DataError(f"{name!r} has no part 'train'; it has {', '.join(parts)}")
    test = [parts[part] for part in ("test", "validation") if part in parts]
    return [parts["train"], *test[:1]]


def _of_type(features: Any, kind: str) -> list[str]:
    return [column for column, feature in features.items() if type(feature).__name__ == kind]
