"""Multichannel series of your own in one .npz."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infssm.data.dataset import Dataset, Indices
from infssm.data.npz import read_npz
from infssm.data.sequences import ArraySequences
from infssm.errors import DataError


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
    test = stored.get("test", np.zeros(len(y), dtype=bool)).astype(bool)
    order = np.argsort(test, kind="stable")
    lengths = stored.get("lengths")
    domains, domain_of = _numbered(stored.get("domain"), order)
    return Dataset(
        name,
        tuple(map(str, stored.get("classes", np.arange(y.max() + 1)).reshape(-1))),
        ArraySequences(x[order], None if lengths is None else lengths[order]),
        y[order],
        num_test=int(test.sum()),
        stratified=True,
        domains=domains,
        domain_of=domain_of,
    )


def _numbered(column: NDArray[Any] | None, order: Indices) -> tuple[tuple[str, ...], Indices | None]:
    """Sorted values of a column, and the number of every sample's."""
    if column is None:
        return (), None
    values, numbers = np.unique(column[order], return_inverse=True)
    return tuple(map(str, values)), numbers.reshape(-1)
