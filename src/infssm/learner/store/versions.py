"""Versions of a learner: every change is a new one, and a tensor that did not change is stored once.

```
learner.json                 which version is the current one
versions/000003.json         settings, classes, history, and the tree of the state; its tensors by their SHA-256
tensors/5f/5f1c...           the bytes of a tensor, or the tree of a module's tensors
lock                         which process writes here
```

A version is written in this order: tensors, then its JSON file, then ``learner.json``. Each file is written aside and
renamed, so a process that is killed at any moment leaves the version before or the version after, never a mixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infssm._files import atomic_file, explained, write_text
from infssm.errors import ConfigError, DataError
from infssm.learner.store.lock import locked

POINTER = "learner.json"
FORMAT = 1
_TENSOR = "tensor"
_TREE = "tensors"
_MANY = 16
"""Tensors of a mapping from which on it is stored once beside them: versions of a frozen model name it alone."""
_EMPTY = torch.empty(0, dtype=torch.uint8)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"(\d{6,})\.json")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip


class Versions:
    """The versions in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        """Whether the folder holds a learner."""
        return (self.folder / POINTER).is_file()

    def lock(self) -> AbstractContextManager[None]:
        """Be the only process that changes the learner, for as long as the context lasts."""
        return locked(self.folder)

    @property
    def current(self) -> int:
        """Number of the current version; 0 where there is none."""
        path = self.folder / POINTER
        try:
            values = json.loads(path.read_text())
            number, format_number = int(values["version"]), int(values["format"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            numbers = ", ".join(map(str, self.numbers)) or "none"
            raise DataError(
                f'{path} is damaged: write {{"format": {FORMAT}, "version": N}} into it, with the number of a version '
                f"that is there ({numbers})"
            ) from None
        if format_number > FORMAT:
            raise DataError(f"{self.folder} is of a newer infssm (format {format_number}, not {FORMAT}): update infssm")
        return number

    @property
    def numbers(self) -> list[int]:
        """Numbers of all versions, in order."""
        return sorted(
            [int(found[1]) for path in self.folder.glob("versions/*") if (found := _VERSION.fullmatch(path.name))]
        )

    def lineage(self, number: int) -> list[int]:
        """A version and those it follows that are still there, newest first."""
        found, there = [], set(self.numbers)
        while number in there:
            found.append(number)
            number = int(self.content(number)["parent"])
        return found

    def write(self, content: Mapping[str, Any], state: Mapping[str, Any], *, parent: int) -> int:
        """Store a new version and make it the current one.

        Args:
            content: plain values.
            state: nested mappings and lists of tensors and plain values.
            parent: the version it follows, to which ``undo`` returns; 0 for none.
        """
        number = max([0, *self.numbers]) + 1
        for name in ("versions", "tensors"):
            with explained(self.folder / name):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        values = {"version": number, "parent": parent, **content, "state": self._encode(state)}
        text = json.dumps(values, allow_nan=False)
        values["checksum"] = hashlib.sha256(text.encode()).hexdigest()
        write_text(self._path(number), json.dumps(values, allow_nan=False) + "\n")
        self.point_to(number)
        return number

    def point_to(self, number: int) -> None:
        """Make a version the current one."""
        write_text(self.folder / POINTER, json.dumps({"format": FORMAT, "version": number}) + "\n")

    def content(self, number: int) -> dict[str, Any]:
        """Everything of a version but its tensors, of which it has the digests."""
        path = self._path(number)
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            checksum = values.pop("checksum")
        except FileNotFoundError:
            known = ", ".join(map(str, self.numbers)) or "none"
            raise ConfigError(f"{self.folder} has no version {number}; it has {known}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DataError(f"{path} is damaged: restore it, or go back with `infssm undo {self.folder}`") from None
        if hashlib.sha256(json.dumps(values, allow_nan=False).encode()).hexdigest() != checksum:
            raise DataError(f"{path} was changed: restore it, or go back with `infssm undo {self.folder}`")
        return values

    def state(self, content: Mapping[str, Any]) -> Any:
        """The state of a version, its tensors on the CPU; every tensor is checked against its digest."""
        return self._decode(content["state"])

    def keep_only(self, numbers: set[int]) -> None:
        """Remove all other versions, and the tensors that none of these has. Foreign files stay."""
        for number in self.numbers:
            if number not in numbers:
                self._path(number).unlink(missing_ok=True)
        used = {digest for number in self.numbers for digest in self._digests(self.content(number)["state"])}
        for path in self.folder.glob("tensors/*/*"):
            unfinished = path.name.endswith(".writing") and _DIGEST.match(path.name.lstrip("."))
            if unfinished or (_DIGEST.fullmatch(path.name) and path.name not in used):
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty
                    path.parent.rmdir()

    def _path(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:06}.json"

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            tensor = value.detach().cpu().contiguous()
            digest = self._store(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            return {_TENSOR: digest, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if isinstance(value, Mapping):
            encoded = {str(key): self._encode(entry) for key, entry in value.items()}
            if len(encoded) >= _MANY and all(
                isinstance(entry, dict) and _TENSOR in entry for entry in encoded.values()
            ):
                return {_TREE: self._store(json.dumps(encoded).encode())}  # the tensors of a module
            return encoded
        if isinstance(value, (list, tuple)):
            return [self._encode(entry) for entry in value]
        return value

    def _store(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        path = self._tensor_path(digest)
        if not path.exists():
            with explained(path):
                path.parent.mkdir(exist_ok=True)
                with atomic_file(path) as file:
                    file.write(content)
        return digest

    def _tensor_path(self, digest: str) -> Path:
        return self.folder / "tensors" / digest[:2] / digest

    def _decode(self, value: Any) -> Any:
        if isinstance(value, dict) and _TENSOR in value:
            flat = torch.frombuffer(content, dtype=torch.uint8) if (content := self._read(value[_TENSOR])) else _EMPTY
            return flat.view(_DTYPES[value["dtype"]]).reshape(value["shape"])
        if isinstance(value, dict) and _TREE in value:
            value = json.loads(self._read(value[_TREE]))
        if isinstance(value, dict):
            return {key: self._decode(entry) for key, entry in value.items()}
        return [self._decode(entry) for entry in value] if isinstance(value, list) else value

    def _read(self, digest: str) -> bytearray:
        """What is stored under a digest, checked."""
        path = self._tensor_path(digest)
        try:
            content = bytearray(path.read_bytes())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; restore it, or use another version") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise DataError(f"{path} is damaged: restore it, or use another version")
        return content

    def _digests(self, value: Any) -> Iterator[str]:
        """Digests of all that a part of a state needs."""
        if isinstance(value, dict) and _TENSOR in value:
            yield value[_TENSOR]
        elif isinstance(value, dict) and _TREE in value:
            yield value[_TREE]
            yield from self._digests(json.loads(self._read(value[_TREE])))
        elif isinstance(value, (dict, list)):
            for entry in value.values() if isinstance(value, dict) else value:
                yield from self._digests(entry)
