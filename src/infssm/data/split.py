"""Train, validation and test indices: drawn once, stored as data, verified when read back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infssm._files import write_text
from infssm.data.dataset import Dataset, Indices
from infssm.data.files import shown
from infssm.errors import ConfigError, DataError

_TRAIN_SHARE = 0.9
_BASE_SHARE = 0.8
_NAMED = 200_000
"""Files whose digests are stored with a split; of more, only the fact that some changed is known."""


@dataclass(frozen=True, eq=False)
class Split:
    """Indices int64 [n] of the three parts of a data set, with its name, classes and fingerprint.

    ``files`` holds the digest of every file by path, to say which ones changed; it is empty for samples in memory and
    for very many files.
    """

    dataset: str
    classes: tuple[str, ...]
    fingerprint: str
    train: Indices
    val: Indices
    test: Indices
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each part."""
        return {"train": len(self.train), "val": len(self.val), "test": len(self.test)}

    @cached_property
    def hash(self) -> str:
        """sha256 over class list, data fingerprint, sizes and all indices."""
        digest = hashlib.sha256(json.dumps([self.classes, self.fingerprint, self.sizes]).encode())
        for part in (self.train, self.val, self.test):
            digest.update(part.astype("<i8").tobytes())
        return digest.hexdigest()

    def verify(self, dataset: Dataset, *, expected_hash: str | None = None) -> None:
        """Raise DataError unless this split was drawn from ``dataset`` as it is now, without overlap."""
        if self.classes != dataset.classes or self.fingerprint != dataset.fingerprint:
            now = _contents(dataset)
            kinds = {
                "added": sorted(now.keys() - self.files.keys()),
                "removed": sorted(self.files.keys() - now.keys()),
                "changed": sorted(path for path in now.keys() & self.files.keys() if now[path] != self.files[path]),
            }
            changes = [f"{len(paths)} files {kind} ({shown(paths)})" for kind, paths in kinds.items() if paths]
            if not (self.files and now and changes):
                parts = "classes" if self.classes != dataset.classes else "samples, labels or their order"
                changes = [f"its {parts} are different"]
            raise DataError(
                f"the data of {dataset.name} changed since this run began: {'; '.join(changes)}; restore the data, "
                "start over with --overwrite, or choose another --out"
            )
        everything = np.concatenate([self.train, self.val, self.test])
        if len(np.unique(everything)) != len(everything):
            raise DataError("the split uses a sample twice")
        if everything.min() < 0 or everything.max() >= len(dataset):
            raise DataError(f"the split names samples outside 0..{len(dataset) - 1}")
        if expected_hash is not None and self.hash != expected_hash:
            raise DataError(f"the split has hash {self.hash[:12]}, the run was started with {expected_hash[:12]}")

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``json.dump``."""
        return {
            "version": 1,
            "dataset": self.dataset,
            "fingerprint": self.fingerprint,
            "hash": self.hash,
            "sizes": self.sizes,
            "classes": list(self.classes),
            "train": self.train.tolist(),
            "val": self.val.tolist(),
            "test": self.test.tolist(),
            "files": dict(self.files),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Split:
        """Rebuild what :meth:`to_json` wrote; DataError if its hash does not match its content."""
        try:
            parts = {name: np.array(data[name], dtype=np.int64).reshape(-1) for name in ("train", "val", "test")}
            files = {str(path): str(digest) for path, digest in data["files"].items()}
            split = cls(data["dataset"], tuple(data["classes"]), data["fingerprint"], **parts, files=files)
            stored = data["hash"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"this is not a stored split: {error!r}") from error
        if split.hash != stored:
            raise DataError("its indices do not match its hash")
        return split

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically."""
        write_text(Path(path), json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Split:
        """Read what :meth:`save` wrote."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except OSError as error:
            raise DataError(
                f"cannot read the split {path}: {error.strerror}; restore it, or start a new run"
            ) from error
        except (ValueError, RecursionError, DataError) as error:
            raise DataError(f"the split {path} is damaged: {error}; restore it, or start a new run") from error


def _contents(dataset: Dataset) -> Mapping[str, str]:
    contents: Mapping[str, str] = getattr(dataset.samples, "contents", {})
    return contents if len(contents) <= _NAMED else {}


def make_split(
    dataset: Dataset,
    *,
    seed: int = 0,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
) -> Split:
    """Draw the split of a data set; the same for every run seed, as in the paper's released code.

    With an official test set: nine tenths of a permutation of the training images train, the rest validates.
    Without: four fifths of a permutation of all images are the base and the rest is the test set, then a second
    permutation from the same generator divides the base nine to one.

    The published benchmarks draw from all classes together, as the released code does. Where the data set is
    ``stratified``, as your own data are, each class of each domain is divided separately with the same shares, so that
    small classes have samples in every part. Where it is ``running``, as text is, nothing is permuted: the end of each
    domain validates.

    Args:
        dataset: the data.
        seed: seed of the generator; the protocol uses 0 for every run seed.
        train_per_class: keep only the first samples of each class (of each domain) for training, and a ninth as many
            (at least one) for validation, so that the two keep their proportion.
        test_per_class: keep only the first samples of each class (of each domain) for testing, and as many for
            validation, whatever ``train_per_class`` is.
    """
    generator = torch.Generator().manual_seed(seed)
    first_test = len(dataset) - dataset.num_test
    base, test = np.arange(first_test), np.arange(first_test, len(dataset))
    strata = dataset.strata

    def cut(indices: Indices, share: float) -> tuple[Indices, Indices]:
        if dataset.stratified:
            return _cut_by_class(indices, strata, share, None if dataset.running else generator)
        # One randperm, cut at int(share * n): what torch's random_split does, in one draw.
        shuffled = indices[torch.randperm(len(indices), generator=generator).numpy()]
        return shuffled[: int(share * len(indices))], shuffled[int(share * len(indices)) :]

    if not dataset.num_test:
        base, test = cut(base, _BASE_SHARE)
    train, val = cut(base, _TRAIN_SHARE)
    val_per_class = test_per_class
    if test_per_class is None and train_per_class is not None:
        val_per_class = max(1, round(train_per_class * (1 - _TRAIN_SHARE) / _TRAIN_SHARE))
    return Split(
        dataset.name,
        dataset.classes,
        dataset.fingerprint,
        _first_per_class(train, strata, train_per_class, "train_per_class"),
        _first_per_class(val, strata, val_per_class, "test_per_class"),
        _first_per_class(test, strata, test_per_class, "test_per_class"),
        _contents(dataset),
    )


def few_shots(split: Split, dataset: Dataset, classes: Indices, shots: int | Sequence[int]) -> Split:
    """A split in which some ``classes`` (labels) have few training samples; those of the others stay.

    ``shots`` is the number of samples per class, the first ones of the split; or the data set indices of the samples of
    all these classes, as few-shot benchmarks publish them. Listed samples that validated do so no longer.
    """
    labels = dataset.labels
    few = np.isin(labels[split.train], classes)
    if isinstance(shots, int):
        chosen = _first_per_class(split.train[few], labels, shots, "shots")
    else:
        chosen = np.array(shots, dtype=np.int64)
        first_test = len(dataset) - dataset.num_test
        if wrong := [i for i in shots if not (0 <= i < first_test and labels[i] in classes and i not in split.test)]:
            raise ConfigError(
                f"data.shots: {wrong[0]} is not the index of a training sample of a class after task 0; indices of "
                f"training samples run from 0 to {first_test - 1}"
            )
        if len(np.unique(chosen)) != len(chosen):
            raise ConfigError("data.shots names a sample twice")
    val = split.val[~np.isin(split.val, chosen)]
    return replace(split, train=np.concatenate([split.train[~few], chosen]), val=val)


def _cut_by_class(
    indices: Indices, labels: Indices, share: float, generator: torch.Generator | None
) -> tuple[Indices, Indices]:
    """Divide each class at ``share`` of its samples, with at least one on each side; a single sample is on the left.

    Which samples are on the left is drawn; without a generator they are the first ones.
    """
    drawn = slice(None) if generator is None else torch.randperm(len(indices), generator=generator).numpy()
    shuffled = indices[drawn]
    counts = np.bincount(labels[indices], minlength=int(labels.max()) + 1)
    left = np.clip(np.rint(share * counts), 1, np.maximum(counts - 1, 1))
    inside = _rank_in_class(shuffled, labels) < left[labels[shuffled]]
    return shuffled[inside], shuffled[~inside]


def _first_per_class(indices: Indices, labels: Indices, limit: int | None, option: str) -> Indices:
    if limit is None:
        return indices
    if limit < 1:
        raise ConfigError(f"{option} must be at least 1, got {limit}")
    return indices[_rank_in_class(indices, labels) < limit]


def _rank_in_class(indices: Indices, labels: Indices) -> Indices:
    """For each index, how many before it in the list are of its class: int64 [n]."""
    of_class = labels[indices]
    order = np.argsort(of_class, kind="stable")
    rank = np.empty(len(indices), dtype=np.int64)
    rank[order] = np.arange(len(indices)) - np.searchsorted(of_class[order], of_class[order])
    return rank
