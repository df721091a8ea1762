"""Data sets by name, and where on disk they are looked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infssm._registry import Registry, check_options, shorten, suggest
from infssm.data.dataset import Dataset
from infssm.data.files import data_root
from infssm.errors import ConfigError, MissingDataError


@dataclass(frozen=True)
class Archive:
    """A file to download and unpack.

    Attributes:
        url: where it is published (http or https).
        file: name of the downloaded file.
        creates: the folder in it, at the top or one level below, that is moved to the data root.
        md5: digest in public use; None if none is known.
        sha256: likewise.
        place: where the folder goes, relative to the data root; its own name unless given.
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
    """Facts about a data set before it is loaded.

    Attributes:
        name: its name.
        load: ``load(root, **options) -> Dataset``.
        summary: one line for lists.
        classes: expected number of classes; None if it is the user's.
        images: expected number of images; None if it is not fixed.
        archives: what fetching downloads; empty when there is nothing to fetch.
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
    from infssm.data.sets.hub import load_hub  # these modules register their data sets here
    from infssm.data.sets.own import load_domains, load_own
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
