"""``run.json``: marks a folder as a run directory, and holds the checksums of its files.

A checksum is written before the file it belongs to, beside the one of the content that is replaced. So a process may be
killed at any moment: what lies there is always one of the two. Checkpoints (``*.ckpt``) and ``split.json`` carry
checksums of their own, and ``config.yaml`` has one over the settings that count, so that folders may be moved.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from infssm._files import write_text
from infssm.errors import DataError
from infssm.learner.store import names

FORMAT = 1
"""Version of the run directory's layout."""


_READ: dict[Path, tuple[tuple[int, ...], Manifest]] = {}
"""Manifests by file, with the version of the file: to load a run takes its manifest for each of its files."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``run.json``.

    Attributes:
        settings: digest of the settings that count, empty before there is a configuration.
        files: per file below the run directory, the digests its content may have: the newest first, at most two.
    """

    settings: str = ""
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a run directory; an empty one where there is none."""
        path = folder / names.MARKER
        try:
            now = os.stat(path)
            version = (now.st_ino, now.st_mtime_ns, now.st_size)
            if (known := _READ.get(path)) is None or known[0] != version:
                values = json.loads(path.read_bytes())
                if values["format"] > FORMAT:
                    newer = f"format {values['format']}, not {FORMAT}"
                    raise DataError(f"{folder} is of a newer infssm ({newer}): update infssm")
                manifest = cls(values["settings"], {name: tuple(found) for name, found in values["files"].items()})
                if values["checksum"] != manifest._checksum():
                    raise ValueError("checksum")
                known = _READ[path] = version, manifest
            return known[1]
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DataError(
                f"{path} is damaged: restore it, or delete it to use the run without its checksums"
            ) from None

    def write(self, folder: Path) -> None:
        """Write ``run.json``."""
        values = {"format": FORMAT, "settings": self.settings, "files": self.files, "checksum": self._checksum()}
        write_text(folder / names.MARKER, json.dumps(values, indent=2) + "\n")

    def _checksum(self) -> str:
        text = json.dumps([self.settings, self.files], sort_keys=True)
        return digest_of(text.encode())

    def expecting(self, name: str, digest: str) -> Manifest:
        """The manifest that also takes ``digest`` for the file ``name``, which is about to be written."""
        before = [known for known in self.files.get(name, ()) if known != digest]
        return replace(self, files={**self.files, name: (digest, *before[:1])})

    def check(self, folder: Path, name: str, content: bytes) -> None:
        """Raise unless ``content`` is what the run wrote to the file ``name``."""
        known = self.files.get(name)
        if known is not None and digest_of(content) not in known:
            raise DataError(
                f"{folder / name} is damaged: its checksum is not the one in {names.MARKER}; {names.REMEDY}"
            )


def digest_of(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_checked(path: Path) -> bytes:
    """Content of a file; one that lies in a run directory is held against the run's checksum.

    Raises OSError where it cannot be read, DataError where it is not what the run wrote.
    """
    content = path.read_bytes()
    for folder in (path.parent, path.parent.parent):
        Manifest.read(folder).check(folder, path.relative_to(folder).as_posix(), content)
    return content
