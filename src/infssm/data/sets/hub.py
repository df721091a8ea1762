"""Data sets of the Hugging Face ``datasets`` library: by name, or saved in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from infssm._optional import require
from infssm.data.dataset import Dataset
from infssm.data.facts import ImageFacts
from infssm.data.files import digest
from infssm.data.images import to_raw, to_rgb
from infssm.data.sets.text import Text, one_line, text_dataset
from infssm.errors import ConfigError, DataError, InfssmError

if TYPE_CHECKING:
    from PIL.Image import Image


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
