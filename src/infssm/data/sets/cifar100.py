"""CIFAR-100 in the layout torchvision leaves behind, or as one .npz."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infssm.data.dataset import Dataset, Indices
from infssm.data.images import ArrayImages
from infssm.data.registry import Archive, find_layout, register_dataset
from infssm.data.sets.own import load_npz
from infssm.errors import DataError

_CANDIDATES = ("cifar-100-python", "cifar100/cifar-100-python", "cifar100.npz", "cifar100/cifar100.npz")


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
    path = find_layout("cifar100", root, _CANDIDATES, what="CIFAR-100")
    if path.suffix == ".npz":
        return load_npz(path, name="cifar100")
    classes = tuple(_text(name) for name in _read(path / "meta", ("fine_label_names",))[0])
    train, train_labels = _read_part(path / "train")
    test, test_labels = _read_part(path / "test")
    pixels = torch.from_numpy(np.concatenate([train, test]))
    labels = np.concatenate([train_labels, test_labels])
    return Dataset("cifar100", classes, ArrayImages(pixels), labels, num_test=len(test))


def _read_part(path: Path) -> tuple[np.ndarray[Any, Any], Indices]:
    data, labels = _read(path, ("data", "fine_labels"))
    pixels = np.asarray(data)
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3 * 32 * 32:
        raise DataError(f"{path}: expected uint8 [n, 3072], got {pixels.dtype} {list(pixels.shape)}")
    return pixels.reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.int64)


def _read(path: Path, keys: tuple[str, ...]) -> list[Any]:
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
