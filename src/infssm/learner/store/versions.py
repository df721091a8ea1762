"""Versions of a learner: every change is a new one, and a tensor that did not change is stored once.

```
learner.json                   which version is the current one
versions/000003.json           settings, classes, history, and the tree of the state; its tensors by their SHA-256
tensors/000003.safetensors     the tensors that version 3 was the first to have; later versions use them, too
lock                           which process writes here
```

A version is written in this order: tensors, then its JSON file, then ``learner.json``. Each file is written aside,
synced and renamed, so a process that is killed at any moment, or a power failure, leaves the version before or the
version after, never a mixture. Versions that are no longer kept are removed last. Where they have to go, because a
class was forgotten, ``learner.json`` says so until they are gone, and the next process that opens the folder finishes
the removal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from infssm._files import atomic_file, explained, sync_folder, write_text
from infssm.errors import ConfigError, DataError
from infssm.learner.store.layout import locked

POINTER = "learner.json"
FORMAT = 1
_KEPT = 20
"""Versions that are kept: the current one and those before it."""
_TENSOR = "tensor"
_TREE = "tensors"
_MANY = 16
"""Tensors of a mapping from which on it is stored as one tensor of text: versions of a frozen model name it alone."""
_OURS = re.compile(r"(\.?)(\d{6,})\.(?:json|safetensors)(?:\.\d+\.writing)?")


class Versions:
    """The versions in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        """Whether the folder holds a learner."""
        return (self.folder / POINTER).is_file()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that changes the learner, for as long as the context lasts."""
        with locked(self.folder, "try again"):
            if self._pointer()["removing"]:
                self._remove_others(self._lineage(self.current))
                self._removed(self.current)
            yield

    def finish_removal(self) -> None:
        """Remove what a process was about to remove when it was killed; not where this one may not write."""
        if self._pointer()["removing"]:
            with contextlib.suppress(ConfigError, OSError), self.lock():
                pass

    @property
    def current(self) -> int:
        """Number of the current version; 0 if there is none."""
        return int(self._pointer()["version"])

    def _pointer(self) -> dict[str, Any]:
        path = self.folder / POINTER
        try:
            values = json.loads(path.read_text())
            number, format_number, removing = int(values["version"]), int(values["format"]), "removing" in values
        except FileNotFoundError:
            return {"version": 0, "removing": False}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise DataError(f"{path} is damaged: {self._remedy()}") from None
        if format_number > FORMAT:
            raise DataError(f"{self.folder} is of a newer infssm (format {format_number}, not {FORMAT}): update infssm")
        return {"version": number, "removing": removing}

    def _remedy(self) -> str:
        numbers = ", ".join(map(str, self.numbers)) or "none"
        return (
            f'restore it, or go back: write {{"format": {FORMAT}, "version": N}} into {self.folder / POINTER}, with '
            f"the number of another version that is there ({numbers})"
        )

    @property
    def numbers(self) -> list[int]:
        """Numbers of all versions, in order."""
        found = [match for path in self.folder.glob("versions/*") if (match := _OURS.fullmatch(path.name))]
        return sorted(int(match[2]) for match in found if not match[1])

    def _lineage(self, number: int) -> list[dict[str, Any]]:
        """A version and those it follows that are still there, newest first, as far as versions are kept."""
        found, there = list[dict[str, Any]](), set(self.numbers)
        while number in there and len(found) < _KEPT:
            found.append(self.content(number))
            number = int(found[-1]["parent"])
        return found

    def write(self, content: Mapping[str, Any], state: Mapping[str, Any], *, parent: int) -> int:
        """Store a new version, make it the current one, and remove the oldest if there are many.

        Args:
            content: plain values.
            state: nested mappings and lists of tensors and plain values.
            parent: the version it follows, to which ``undo`` returns; 0 for none: all other versions are removed.
        """
        number, before = max([0, *self.numbers]) + 1, self._lineage(parent)[: _KEPT - 1]
        for name in ("versions", "tensors"):
            with explained(self.folder / name):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        encoded = _encode(state, tensors)
        stored: dict[str, int] = {}
        for file_number in before[0]["files"] if before else ():
            with self._reading(file_number) as path, safe_open(path, "pt") as file:
                stored |= dict.fromkeys(file.keys(), file_number)
        new = {digest: tensor for digest, tensor in tensors.items() if digest not in stored}
        if new:
            path = self._tensors(number)
            with explained(path), atomic_file(path) as out:
                out.write(save({digest: tensor.clone() for digest, tensor in new.items()}))  # none shares memory
        files = sorted({stored.get(digest, number) for digest in tensors})
        values = {"version": number, "parent": parent, **content, "files": files, "state": encoded}
        text = json.dumps(values, allow_nan=False)
        values["checksum"] = hashlib.sha256(text.encode()).hexdigest()
        write_text(self._path(number), json.dumps(values, allow_nan=False) + "\n")
        removing = not parent and len(self.numbers) > 1
        self.point_to(number, removing=removing)
        self._remove_others([values, *before])
        if removing:
            self._removed(number)
        return number

    def point_to(self, number: int, *, removing: bool = False) -> None:
        """Make a version the current one; ``removing`` says that those that it does not follow are still to go."""
        values = {"format": FORMAT, "version": number} | ({"removing": True} if removing else {})
        write_text(self.folder / POINTER, json.dumps(values) + "\n")

    def _removed(self, current: int) -> None:
        """Note that all was removed that had to be, once no power failure can bring it back."""
        for name in ("versions", "tensors"):
            sync_folder(self.folder / name)
        self.point_to(current)

    def content(self, number: int) -> dict[str, Any]:
        """Everything of a version except its tensors, for which it has digests."""
        path = self._path(number)
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            checksum = values.pop("checksum")
        except FileNotFoundError:
            known = ", ".join(map(str, self.numbers)) or "none"
            raise ConfigError(f"{self.folder} has no version {number}; it has {known}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DataError(f"{path} is damaged: {self._remedy()}") from None
        if hashlib.sha256(json.dumps(values, allow_nan=False).encode()).hexdigest() != checksum:
            raise DataError(f"{path} was changed: {self._remedy()}")
        return values

    def state(self, content: Mapping[str, Any]) -> Any:
        """The state of a version, its tensors on the CPU; every tensor is checked against its digest."""
        tensors: dict[str, Tensor] = {}
        for file in content["files"]:
            with self._reading(file) as path:
                found = load(path.read_bytes())
            if any(_digest(tensor) != digest for digest, tensor in found.items()):
                raise DataError(f"{path} is damaged: {self._remedy()}")
            tensors |= found
        try:
            return _decode(content["state"], tensors)
        except KeyError:
            raise DataError(f"tensors of version {content['version']} are missing: {self._remedy()}") from None

    def _remove_others(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Remove all other versions, the tensors that none of these has, and unfinished files. Foreign files stay."""
        for name, numbers in (
            ("versions", {int(content["version"]) for content in kept}),
            ("tensors", {int(file) for content in kept for file in content["files"]}),
        ):
            for path in (self.folder / name).glob("*"):
                match = _OURS.fullmatch(path.name)
                if match and (match[1] or int(match[2]) not in numbers):
                    with explained(path):
                        path.unlink(missing_ok=True)
        for path in self.folder.glob(f".{POINTER}.*.writing"):
            path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:06}.json"

    def _tensors(self, number: int) -> Path:
        return self.folder / "tensors" / f"{number:06}.safetensors"

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[Path]:
        """The file of the tensors of a version; errors in reading it become a DataError with the remedy."""
        path = self._tensors(int(number))
        try:
            yield path
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            raise DataError(f"cannot read {path}: {reason}; {self._remedy()}") from None


def _digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A state with digests instead of tensors, which are added to ``tensors``."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        digest = _digest(tensor)
        tensors[digest] = tensor
        return {_TENSOR: digest}
    if isinstance(value, Mapping):
        encoded = {str(key): _encode(entry, tensors) for key, entry in value.items()}
        if len(encoded) >= _MANY and all(isinstance(entry, dict) and _TENSOR in entry for entry in encoded.values()):
            text = torch.tensor(list(json.dumps(encoded).encode()), dtype=torch.uint8)
            return {_TREE: _encode(text, tensors)[_TENSOR]}
        return encoded
    return [_encode(entry, tensors) for entry in value] if isinstance(value, (list, tuple)) else value


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict) and _TENSOR in value:
        return tensors[value[_TENSOR]].clone()  # equal tensors are stored once, and are not to change together
    if isinstance(value, dict) and _TREE in value:
        value = json.loads(bytes(tensors[value[_TREE]].tolist()))
    if isinstance(value, dict):
        return {key: _decode(entry, tensors) for key, entry in value.items()}
    return [_decode(entry, tensors) for entry in value] if isinstance(value, list) else value
