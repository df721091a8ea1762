"""The data sets that come as one folder per class: ImageNet-R, Caltech-256, CUB-200-2011."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infssm.data.dataset import Dataset
from infssm.data.images import FileImages
from infssm.data.registry import Archive, find_layout, register_dataset
from infssm.data.sets.own import load_folders
from infssm.errors import DataError


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
    return _require_classes(load_folders(path, name="imagenet-r"), 200, path)


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
    return _require_classes(load_folders(path, name="caltech256", max_classes=250), 250, path)


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
        return _require_classes(load_folders(path, name="cub200"), 200, path)
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
    return _require_classes(dataset, 200, path)


def _read_table(file: Path) -> dict[str, str]:
    try:
        return dict(line.split() for line in file.read_text().splitlines() if line.strip())
    except OSError as error:
        raise DataError(f"{file} is missing: infssm data fetch cub200 writes it") from error
    except ValueError as error:
        raise DataError(f"{file} must hold two words per line") from error


def _require_classes(dataset: Dataset, count: int, path: Path) -> Dataset:
    if dataset.num_classes != count:
        raise DataError(f"{dataset.name}: {dataset.num_classes} class folders at {path}, expected {count}")
    return dataset
