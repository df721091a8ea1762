"""Published data sets: CIFAR-100, ImageNet-R, Caltech-256, CUB-200-2011, and spoken digits."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infssm.data.dataset import DATASETS, Archive, Dataset, Indices, find_layout, register_dataset
from infssm.data.images import ArrayImages, FileImages
from infssm.data.sequences import SoundFiles
from infssm.data.sets.own import load_folders, load_npz
from infssm.errors import DataError

_RECORDING = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav")
_TEST = 5
"""Recordings 0 to 4 of every speaker and spoken digit are the test set: the authors' rule."""


@register_dataset(
    "cifar100",
    summary="CIFAR-100: 32x32 colour, 50,000 train and 10,000 test images",
    classes=100,
    images=60_000,
    archives=(
        Archive(
            url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            file="cifar-100-python.tar.gz",
            creates="cifar-100-python",
            md5="eb9058c3a382ffc7106e4002c42a8d85",  # torchvision
        ),
    ),
)
def cifar100(root: Path) -> Dataset:
    """CIFAR-100 with the official order of classes and images."""
    candidates = ("cifar-100-python", "cifar100/cifar-100-python", "cifar100.npz", "cifar100/cifar100.npz")
    path = find_layout("cifar100", root, candidates, what="CIFAR-100")
    if path.suffix == ".npz":
        return load_npz(path, name="cifar100")
    classes = tuple(_text(name) for name in _read_pickle(path / "meta", ("fine_label_names",))[0])
    train, train_labels = _read_part(path / "train")
    test, test_labels = _read_part(path / "test")
    pixels = torch.from_numpy(np.concatenate([train, test]))
    labels = np.concatenate([train_labels, test_labels])
    return Dataset("cifar100", classes, ArrayImages(pixels), labels, num_test=len(test))


def _read_part(path: Path) -> tuple[np.ndarray[Any, Any], Indices]:
    data, labels = _read_pickle(path, ("data", "fine_labels"))
    pixels = np.asarray(data)
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3 * 32 * 32:
        raise DataError(f"{path}: expected uint8 [n, 3072], got {pixels.dtype} {list(pixels.shape)}")
    return pixels.reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.int64)


def _read_pickle(path: Path, keys: tuple[str, ...]) -> list[Any]:
    try:
        with path.open("rb") as file:
            stored = _Unpickler(file, encoding="bytes").load()
        stored = {_text(key): value for key, value in stored.items()}
        return [stored[key] for key in keys]
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: infssm data fetch cifar100 writes it") from error
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged or not of CIFAR-100: {error!r}") from error


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


class _Unpickler(pickle.Unpickler):
    """Reads arrays and plain values only: a pickle from elsewhere must not run code."""

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"refused to load {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


@register_dataset(
    "imagenet-r",
    summary="ImageNet-R: renditions of 200 ImageNet classes, 30,000 images",
    classes=200,
    images=30_000,
    archives=(
        Archive(
            url="https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
            file="imagenet-r.tar",
            creates="imagenet-r",
            md5="a61312130a589d0ca1a8fca1f2bd3337",  # in use by several public loaders; the authors publish none
        ),
    ),
)
def imagenet_r(root: Path) -> Dataset:
    """ImageNet-R; it has no official split."""
    path = find_layout("imagenet-r", root, ("imagenet-r", "imagenet_r", "ImageNet-R"), what="ImageNet-R")
    return _require_classes(load_folders(path, name="imagenet-r"), path)


@register_dataset(
    "caltech256",
    summary="Caltech-256: the first 250 of its 257 folders, as in the paper",
    classes=250,
    archives=(
        Archive(
            url="https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
            file="256_ObjectCategories.tar",
            creates="256_ObjectCategories",
            md5="67b4f42ca05d46448c6bb8ecd2220f6d",  # torchvision
        ),
    ),
)
def caltech256(root: Path) -> Dataset:
    """The first 250 sorted folders of Caltech-256; it has no official split."""
    candidates = ("256_ObjectCategories", "caltech256/256_ObjectCategories", "caltech256")
    path = find_layout("caltech256", root, candidates, what="Caltech-256")
    return _require_classes(load_folders(path, name="caltech256", max_classes=250), path)


@register_dataset(
    "cub200",
    summary="CUB-200-2011: 200 kinds of birds, 5,994 train and 5,794 test images",
    classes=200,
    images=11_788,
    archives=(
        Archive(
            url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            file="CUB_200_2011.tgz",
            creates="CUB_200_2011",
            md5="97eceeb196236b17998738112f37df78",  # in use by several public loaders
        ),
    ),
)
def cub200(root: Path) -> Dataset:
    """CUB-200-2011 as published, or as ``train/`` and ``test/`` with one folder per class; both give the same order."""
    candidates = ("CUB_200_2011", "cub200/CUB_200_2011", "cub200")
    path = find_layout("cub200", root, candidates, what="CUB-200-2011")
    if (path / "train").is_dir():
        return _require_classes(load_folders(path, name="cub200"), path)
    everything = load_folders(path / "images", name="cub200") if (path / "images").is_dir() else None
    if everything is None or not isinstance(everything.images, FileImages):
        raise DataError(f"{path} has neither train/ and test/ nor images/")
    names, flags = _read_table(path / "images.txt"), _read_table(path / "train_test_split.txt")
    is_train = {name: flags[number] == "1" for number, name in names.items() if number in flags}
    missing = [name for name in everything.images.paths if name not in is_train]
    if missing:
        raise DataError(f"{path}: train_test_split.txt does not name {missing[0]} ({len(missing)} images unknown)")
    train = np.array([is_train[name] for name in everything.images.paths])
    order = np.concatenate([np.flatnonzero(train), np.flatnonzero(~train)])
    images = FileImages(path / "images", tuple(everything.images.paths[i] for i in order))
    dataset = Dataset("cub200", everything.classes, images, everything.labels[order], num_test=int((~train).sum()))
    return _require_classes(dataset, path)


def _read_table(file: Path) -> dict[str, str]:
    try:
        return dict(line.split() for line in file.read_text().splitlines() if line.strip())
    except OSError as error:
        raise DataError(f"{file} is missing: infssm data fetch cub200 writes it") from error
    except ValueError as error:
        raise DataError(f"{file} must hold two words per line") from error


def _require_classes(dataset: Dataset, path: Path) -> Dataset:
    count = DATASETS[dataset.name].classes
    if dataset.num_classes != count:
        raise DataError(f"{dataset.name}: {dataset.num_classes} class folders at {path}, expected {count}")
    return dataset


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
    recordings = [(m, path.name) for path in sorted(folder.glob("*.wav")) if (m := _RECORDING.fullmatch(path.name))]
    if not recordings:
        raise DataError(f"{folder} holds no recordings such as 7_jackson_32.wav")
    recordings.sort(key=lambda item: (int(item[0][3]) < _TEST, item[1]))
    speakers = tuple(sorted({match[2] for match, _ in recordings}))
    return Dataset(
        "speech-digits",
        tuple("0123456789"),
        SoundFiles(folder, tuple(name for _, name in recordings), 8000),
        np.array([int(match[1]) for match, _ in recordings]),
        num_test=sum(int(match[3]) < _TEST for match, _ in recordings),
        stratified=True,
        domains=speakers,
        domain_word="speaker",
        domain_of=np.array([speakers.index(match[2]) for match, _ in recordings]),
    )
