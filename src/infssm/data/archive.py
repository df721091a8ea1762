"""Unpacking archives from elsewhere without trusting them."""

from __future__ import annotations

import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from infssm.data.files import require_regular
from infssm.errors import DataError


def extract(archive: Path, into: Path) -> None:
    """Unpack a tar (plain or compressed) or zip into the empty or new folder ``into``.

    Only regular files and folders are written, all below ``into``: absolute paths, ``..``, links and devices are
    refused with a DataError before anything of them is written.
    """
    into.mkdir(parents=True, exist_ok=True)
    try:
        require_regular(archive)
        members = _zip_members if zipfile.is_zipfile(archive) else _tar_members
        for name, content in members(archive):
            _write(archive, name, content, into)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot unpack {archive}: {error}") from error
    except Exception as error:  # on damaged archives tarfile, zipfile and the decompressors raise almost anything
        raise DataError(f"{archive} is truncated or damaged ({error}): delete it and fetch it again") from error


def _tar_members(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if not (member.isreg() or member.isdir()):
                raise DataError(f"{archive} holds {member.name!r}, which is a link or a device: refused")
            yield member.name, tar.extractfile(member) if member.isreg() else None


def _zip_members(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(f"{archive} holds {member.filename!r}, which is a link or a device: refused")
            if member.is_dir():
                yield member.filename, None
            else:
                with zipped.open(member) as content:
                    yield member.filename, content


def _write(archive: Path, name: str, content: IO[bytes] | None, into: Path) -> None:
    target = into / _inside(archive, name)
    if content is None:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(content, file)


def _inside(archive: Path, name: str) -> PurePosixPath:
    """The member's path, once it is certain to stay below the folder it is unpacked into."""
    path = PurePosixPath(name.replace("\\", "/"))
    drive = PureWindowsPath(name).drive
    if path.is_absolute() or ".." in path.parts or drive or "\0" in name:
        raise DataError(f"{archive} holds {name!r}, which leads outside: refused")
    return path
