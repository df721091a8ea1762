"""Files that cannot be read: found before training, not in the middle of it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from infssm.data.dataset import Dataset
from infssm.data.files import Files, Progress
from infssm.errors import DataError

_SHOWN = 10


def find_unreadable(dataset: Dataset, progress: Progress | None = None) -> dict[int, str]:
    """Index and reason of every file that cannot be read; empty for samples in memory.

    Every file is decoded once. That it can be read is kept in the cache folder, and the file is decoded again only
    when its size or its time of change differs.
    """
    return dataset.samples.unreadable(progress) if isinstance(dataset.samples, Files) else {}


def require_readable(dataset: Dataset, *, skip_unreadable: bool = False, progress: Progress | None = None) -> Dataset:
    """The data set if every file of it can be read; DataError lists those that cannot.

    Args:
        dataset: the data.
        skip_unreadable: return the data set without them instead, with a warning.
        progress: see :data:`~infssm.data.files.Progress`.
    """
    bad = find_unreadable(dataset, progress)
    if not bad:
        return dataset
    files = dataset.samples
    assert isinstance(files, Files)
    if skip_unreadable:
        warnings.warn(f"{dataset.name}: {len(bad)} files cannot be read and are left out", UserWarning, stacklevel=2)
        keep = np.array([n for n in range(len(dataset)) if n not in bad], dtype=np.int64)
        return replace(
            dataset,
            samples=replace(files, paths=tuple(files.paths[n] for n in keep)),  # type: ignore[type-var]
            labels=dataset.labels[keep],
            num_test=int((keep >= len(dataset) - dataset.num_test).sum()),
            domain_of=None if dataset.domain_of is None else dataset.domain_of[keep],
        )
    shown = "\n".join(
        f"  cannot read the {files.word} {files.root / files.paths[n]}: {reason}"
        for n, reason in list(bad.items())[:_SHOWN]
    )
    more = f"\n  and {len(bad) - _SHOWN} more: infssm data check {files.root} lists all" if len(bad) > _SHOWN else ""
    raise DataError(
        f"{dataset.name}: {len(bad)} of {len(dataset)} files cannot be read\n{shown}{more}\n"
        "replace or delete them, or go on without them: data.skip_unreadable=true"
    )
