"""Data sets of the Hugging Face ``datasets`` library: by name, or saved in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from infssm.data.dataset import Dataset
from infssm.data.images import to_raw, to_rgb
from infssm.data.sets.text import text_dataset
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image


class TableImages:
    """Images of a column of tables, one table after the other, decoded when asked for.

    Args:
        tables: of the ``datasets`` library.
        column: which holds images.
    """

    channels = 3

    def __init__(self, tables: Sequence[Any], column: str) -> None:
        self._tables = tuple(tables)
        self._column = column
        self._ends = np.cumsum([len(table) for table in self._tables])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def pil(self, index: int, at_least: int | None = None) -> Image:  # noqa: ARG002 - the library decodes whole images
        """Image ``index`` as an RGB PIL image; DataError where it cannot be read."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        table = self._tables[number]
        try:
            return to_rgb(table[int(index - (self._ends[number] - len(table)))][self._column])
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"cannot read image {index} of column {self._column!r}: {error}") from error

    def raw(self, indices: Sequence[int], size: int) -> Tensor:
        """Images with the short side resized to ``size``, cut to the central square: uint8 [n, 3, size, size]."""
        return torch.stack([to_raw(self.pil(int(index)), size) for index in indices])

    def fingerprint(self) -> str:
        """Digest of the tables' own."""
        prints = [self._column, *(str(table._fingerprint) for table in self._tables)]
        return hashlib.sha256("\n".join(prints).encode()).hexdigest()[:16]


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

    Args:
        name: a name on the hub, or a folder written by ``save_to_disk``.
        image: column of images; the only one of that type unless given.
        label: column of class labels; likewise.
        text: column of text, where there are no images.
        domain: column whose values are domains; for text a must, unless there is one domain.
        length: tokens of a sample of text.
        tokenizer: see :func:`~infssm.data.sets.text.text_folder`.
    """
    tables = _parts(name)
    features = tables[0].features
    short = Path(name).name
    if text is not None or not _of_type(features, "Image"):
        column = _choose(name, features, text, "Value", "text")
        contents: dict[str, list[bytes]] = {}
        for table in tables:
            for row in table.select_columns([column, *([domain] if domain else [])]):
                contents.setdefault(str(row[domain]) if domain else "text", []).append(str(row[column]).encode())
        texts = {key: contents[key] for key in sorted(contents)}
        found = text_dataset(short, texts, length=length, tokenizer=tokenizer)
        return replace(found, domain_word=domain or "domain")
    images = TableImages(tables, _choose(name, features, image, "Image", "image"))
    column = _choose(name, features, label, "ClassLabel", "label")
    labels = np.concatenate([np.asarray(table[column]) for table in tables])
    values = np.concatenate([np.asarray(table[domain]).astype(str) for table in tables]) if domain else None
    domains, domain_of = ((), None) if values is None else np.unique(values, return_inverse=True)
    return Dataset(
        short,
        tuple(features[column].names),
        images,
        labels,
        num_test=len(tables[1]) if len(tables) > 1 else 0,
        stratified=True,
        domains=tuple(map(str, domains)),
        domain_of=domain_of,
        domain_word=domain or "domain",
    )


def _parts(name: str) -> list[Any]:
    """The training table, and the test (else the validation) table where there is one."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data=hf:... needs the datasets library: pip install 'infssm[hf]'") from error
    folder = Path(name).expanduser()
    try:
        found: Any = datasets.load_from_disk(str(folder)) if folder.is_dir() else datasets.load_dataset(name)
    except Exception as error:
        raise DataError(f"cannot load {name!r} with the datasets library: {error}") from error
    if not isinstance(found, datasets.DatasetDict):
        return [found]
    if "train" not in found:
        raise DataError(f"{name!r} has no part 'train'; it has {', '.join(found)}")
    test = next((part for part in ("test", "validation") if part in found), None)
    return [found["train"], *([found[test]] if test else [])]


def _of_type(features: Any, kind: str) -> list[str]:
    return [column for column, feature in features.items() if type(feature).__name__ == kind]


def _choose(name: str, features: Any, wanted: str | None, kind: str, option: str) -> str:
    """The column that was asked for, else the only one of its type."""
    there = _of_type(features, kind)
    if wanted is None and len(there) != 1:
        raise ConfigError(f"{name!r} has {len(there)} columns of type {kind}: choose one with data.options.{option}")
    if wanted is not None and wanted not in there:
        raise ConfigError(f"{name!r} has no column {wanted!r} of type {kind}; it has {', '.join(there) or 'none'}")
    return wanted or there[0]
