"""Data sets: samples, labels, classes, domains and the official test set; found by their names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infssm._modality import Modality, modality_of
from infssm._registry import Registry, check_options, shorten, suggest
from infssm.data.facts import SampleFacts
from infssm.data.files import Files, Progress, data_root, digest, shown
from infssm.data.images import Images
from infssm.data.sequences import Sequences
from infssm.errors import ConfigError, DataError, MissingDataError

Indices = NDArray[np.int64]
_SHOWN = 10
"""Unreadable files that an error names."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples of a data set in one index space.

    Where the data set has an official test set, its samples come last, so every sample has one index whatever its
    role.

    Attributes:
        name: name it was loaded by.
        classes: class names; the position is the label. Text without classes has a single one.
        samples: images, or sequences (audio, series, tokens).
        labels: int64 [n] label of every sample.
        num_test: how many of the last samples are the official test set; 0 when there is none.
        stratified: whether a split divides each class separately; the protocol of the benchmarks does not.
        running: whether samples follow one another, as pieces of a text do. A validation sample between two training
            samples would be too easy, so the end of each domain validates. For stratified data only.
        domains: names of the domains (speakers, kinds of text, years); the position is the number in ``domain_of``.
        domain_of: int64 [n] domain of every sample; None if there is one domain.
        domain_word: what a domain is, as ``data.by`` may call it.
    """

    name: str
    classes: tuple[str, ...]
    samples: Images | Sequences
    labels: Indices
    num_test: int = 0
    stratified: bool = False
    running: bool = False
    domains: tuple[str, ...] = ()
    domain_of: Indices | None = None
    domain_word: str = "domain"

    def __post_init__(self) -> None:
        if len(set(self.classes)) < len(self.classes):
            twice = next(name for i, name in enumerate(self.classes) if name in self.classes[:i])
            raise DataError(f"{self.name}: two classes are named {twice!r}: give each class a name of its own")
        labels = np.asarray(self.labels)
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(f"{self.name}: labels must be integers [n], got {labels.dtype} {list(labels.shape)}")
        if len(labels) != len(self.samples):
            raise DataError(f"{self.name}: {len(self.samples)} samples but {len(labels)} labels")
        if len(labels) == 0:
            raise DataError(f"{self.name}: the data set holds no samples")
        if labels.min() < 0 or labels.max() >= len(self.classes):
            raise DataError(
                f"{self.name}: labels run from {labels.min()} to {labels.max()}, but {len(self.classes)} classes "
                f"need 0 to {len(self.classes) - 1}"
            )
        object.__setattr__(self, "labels", labels.astype(np.int64))
        for role, part in self.splits.items():
            counts = np.bincount(self.labels[part.start : part.stop], minlength=len(self.classes))
            if empty := [self.classes[label] for label in np.flatnonzero(counts == 0)]:
                raise DataError(f"{self.name}: {len(empty)} classes have no {role} samples: {shown(empty)}")
        if self.domain_of is not None:
            domain_of = np.asarray(self.domain_of)
            known = np.issubdtype(domain_of.dtype, np.integer) and domain_of.shape == self.labels.shape
            if not known or domain_of.min() < 0 or domain_of.max() >= len(self.domains):
                raise DataError(
                    f"{self.name}: domain_of must hold a number of the {len(self.domains)} domains per sample"
                )
            object.__setattr__(self, "domain_of", domain_of.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> Images:
        """The samples, where they are images."""
        if isinstance(self.samples, Sequences):
            raise ConfigError(f"{self.name} holds {self.samples.kind}, not images")
        return self.samples

    @property
    def sequences(self) -> Sequences:
        """The samples, where they are sequences."""
        if not isinstance(self.samples, Sequences):
            raise ConfigError(f"{self.name} holds {self.facts.kind}, not sequences")
        return self.samples

    @property
    def strata(self) -> Indices:
        """int64 [n]: samples of one class and one domain have one number."""
        if self.domain_of is None:
            return self.labels
        return self.labels * len(self.domains) + self.domain_of

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def modality(self) -> Modality:
        """The kind of data of the samples."""
        return modality_of(self.facts.kind, self.num_classes)

    @property
    def facts(self) -> SampleFacts:
        """Shape and kind of the samples."""
        return self.samples.facts(self.name)

    @property
    def splits(self) -> dict[str, range]:
        """Official parts as index ranges: ``train`` and ``test``, or ``all`` where there is no official test set."""
        first_test = len(self) - self.num_test
        if self.num_test == 0:
            return {"all": range(len(self))}
        return {"train": range(first_test), "test": range(first_test, len(self))}

    @cached_property
    def fingerprint(self) -> str:
        """Digest of labels, domains and samples' identity; a split belongs to exactly one fingerprint."""
        numbers = [part.astype("<i8").tobytes() for part in (self.labels, self.domain_of) if part is not None]
        return digest([*numbers, f"{self.num_test} {self.samples.fingerprint()}"])


def find_unreadable(dataset: Dataset, progress: Progress | None = None) -> dict[int, str]:
    """Index and reason of every file that cannot be read; empty for samples in memory.

    Every file is decoded once. The result is cached until the size or the modification time of the file changes.
    """
    return dataset.samples.unreadable(progress) if isinstance(dataset.samples, Files) else {}


def require_readable(dataset: Dataset, *, skip_unreadable: bool = False) -> Dataset:
    """The data set if every file of it can be read; DataError lists those that cannot.

    ``skip_unreadable`` returns the data set without them instead, with a warning.
    """
    bad = find_unreadable(dataset)
    if not bad:
        return dataset
    files = dataset.samples
    assert isinstance(files, Files)
    if skip_unreadable:
        warnings.warn(f"{dataset.name}: {len(bad)} files cannot be read and are left out", UserWarning, stacklevel=2)
        keep = np.array([n for n in range(len(dataset)) if n not in bad], dtype=np.int64)
        return replace(
            dataset,
            samples=replace(files, paths=tuple(files.paths[n] for n in keep)),
            labels=dataset.labels[keep],
            num_test=int((keep >= len(dataset) - dataset.num_test).sum()),
            domain_of=None if dataset.domain_of is None else dataset.domain_of[keep],
        )
    lines = [
        f"\n  cannot read the {files.word} {files.root / files.paths[n]}: {reason}"
        for n, reason in list(bad.items())[:_SHOWN]
    ]
    if len(bad) > _SHOWN:
        lines.append(f"\n  and {len(bad) - _SHOWN} more: infssm data check {files.root} lists all")
    raise DataError(
        f"{dataset.name}: {len(bad)} of {len(dataset)} files cannot be read{''.join(lines)}\n"
        "replace or delete them, or continue without them: data.skip_unreadable=true"
    )


@dataclass(frozen=True)
class Archive:
    """A file to download from ``url`` and unpack; digests in public use are checked, where they are known.

    ``creates`` is the folder in it, at the top or one level below, that is moved to ``place`` below the data root, by
    default under its own name.
    """

    url: str
    file: str
    creates: str
    md5: str | None = None
    sha256: str | None = None
    place: str | None = None

    @property
    def target(self) -> str:
        """Where the folder goes, relative to the data root."""
        return self.place or self.creates


@dataclass(frozen=True)
class DatasetEntry:
    """What is known about a data set before ``load(root, **options)`` loads it.

    ``summary`` is its line in lists, ``classes`` and ``images`` are the expected numbers, where they are fixed, and
    ``archives`` are downloaded to fetch it.
    """

    name: str
    load: Callable[..., Dataset]
    summary: str = ""
    classes: int | None = None
    images: int | None = None
    archives: tuple[Archive, ...] = ()


DATASETS: Registry[DatasetEntry] = Registry("data set", "infssm.datasets")


def register_dataset(
    name: str,
    *,
    summary: str = "",
    classes: int | None = None,
    images: int | None = None,
    archives: tuple[Archive, ...] = (),
) -> Callable[[Callable[..., Dataset]], DatasetEntry]:
    """Register a loader ``(root: Path, **options) -> Dataset`` under ``name``.

    The decorated name becomes the :class:`DatasetEntry`, which is also what an ``infssm.datasets`` entry point names.
    """

    def add(load: Callable[..., Dataset]) -> DatasetEntry:
        return DATASETS.register(name)(DatasetEntry(name, load, summary, classes, images, archives))

    return add


def list_datasets() -> list[str]:
    """Names of all registered data sets."""
    return list(DATASETS)


def find_layout(name: str, root: Path, candidates: tuple[str, ...], *, what: str) -> Path:
    """First of ``root/candidate`` that exists; else an error that names the places and the fix."""
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    fetch = ""
    if name in DATASETS and DATASETS[name].archives:
        fetch = f"\nfetch it with: infssm data fetch {name} --data-root {root}"
    places = "\n".join(f"  {root / candidate}" for candidate in candidates)
    raise MissingDataError(
        f"{name}: {what} not found; looked for\n{places}\n"
        f"set the place with --data-root or $INFSSM_DATA (now {root}){fetch}"
    )


def load_dataset(name: str, root: str | Path | None = None, **options: Any) -> Dataset:
    """Load a registered data set, or your own.

    Args:
        name: a registered name; or the path of a folder with one folder per class (or with ``train/`` and ``test/``
            of that form), or of an ``.npz`` with x_train, y_train, x_test, y_test and classes (images) or x and y
            (series); or the name of such a folder or file under the data root; or ``domains:`` and a folder with a
            folder per domain, ``text:`` and a folder of text files per domain, ``hf:`` and a name or folder of the
            datasets library.
        root: data root; see :func:`data_root`.
        **options: passed to the loader, such as ``size`` for ``synthetic``.
    """
    # These modules register their data sets here.
    from infssm.data.sets.own import load_domains, load_hub, load_own
    from infssm.data.sets.text import text_folder

    place, known = data_root(root), set(DATASETS)
    kind, _, rest = name.partition(":")
    own, below = Path(os.path.expanduser(name)), Path(os.path.expanduser(rest))
    load: partial[Dataset] | None = None
    if name in known:
        load = partial(DATASETS[name].load, place)
    elif kind == "hf" and rest:
        load = partial(load_hub, rest)
    elif kind in ("text", "domains") and rest:
        load = partial(text_folder if kind == "text" else load_domains, below)
    else:
        for candidate in (own, place / name, place / f"{name}.npz"):
            # os.path: False, not an error, for names that no system can hold
            if os.path.isdir(candidate) or (os.path.isfile(candidate) and candidate.suffix == ".npz"):
                load = partial(load_own, candidate, name=candidate.stem)
                break
    if load is not None:
        return load(**check_options(f"data set {name!r} (data.options)", load, options))
    if "/" in name or name.endswith(".npz"):
        raise MissingDataError(
            f"no data at {shorten(str(own), 200)}: give a folder with one folder per class, or an .npz"
        )
    raise ConfigError(f"unknown data set {name!r}{suggest(name, known)}; neither is there {place / name}[.npz]")
