"""Downloads that can be interrupted and resumed, and are checked before they are used."""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infssm.errors import ConfigError, DataError

Progress = Callable[[int, int | None], None]
"""Called with the bytes present and the bytes expected (None where the server does not say)."""

_CHUNK = 1 << 18


def download(
    url: str,
    target: Path,
    *,
    md5: str | None = None,
    sha256: str | None = None,
    progress: Progress | None = None,
    attempts: int = 5,
    timeout: float = 30.0,
    wait: float = 2.0,
) -> Path:
    """Download ``url`` to ``target``; nothing is at ``target`` before the whole file is there and checked.

    What has arrived is kept in ``target.part``; a later call, or the next attempt, asks the server for the rest.

    Args:
        url: http or https.
        target: final path.
        md5: digest to check, where one is known.
        sha256: likewise.
        progress: told about every piece.
        attempts: connections in a row that may bring nothing new before giving up.
        timeout: seconds of silence after which a connection counts as lost.
        wait: seconds before the next connection.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"can only download over http or https, not {url}")
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    left = attempts
    while True:
        before = _size(part)
        reason = _receive(url, part, progress, timeout)
        if reason is None:
            break
        left = attempts if _size(part) > before else left - 1
        if left <= 0:
            raise DataError(f"download of {url} stopped: {reason}; {_size(part)} bytes are kept, run it again to go on")
        time.sleep(wait)
    try:
        verify_file(part, md5=md5, sha256=sha256)
    except DataError as error:
        part.unlink()
        raise DataError(f"{url}: {error}; the download was removed, try again") from error
    os.replace(part, target)
    return target


def verify_file(path: Path, *, md5: str | None = None, sha256: str | None = None) -> None:
    """Raise DataError unless the file has the given digests; digests not given are not checked."""
    for name, expected in (("md5", md5), ("sha256", sha256)):
        if expected is None:
            continue
        digest = hashlib.new(name, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != expected:
            raise DataError(f"{path.name} has {name} {digest.hexdigest()}, expected {expected}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(url: str, part: Path, progress: Progress | None, timeout: float) -> str | None:
    """One connection; None when the file is complete, else why it is not."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "infssm", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return _append(response, part, have, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # more than the server has, or all of it: the digest of a fresh copy decides
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return None
            part.unlink()
            return "the server has less than was kept; starting anew"
        if error.code < 500:
            raise DataError(f"{url}: the server answers {error.code} {error.reason}") from error
        return f"the server answers {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", None) or error or type(error).__name__)


def _append(response: Any, part: Path, have: int, progress: Progress | None) -> str | None:
    resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
    if not resumed:
        have = 0
    length = response.headers.get("Content-Length")
    total = None if length is None else have + int(length)
    with part.open("ab" if resumed else "wb") as file:
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            have += len(chunk)
            if progress is not None:
                progress(have, total)
    return None if total is None or have == total else f"the connection was cut at {have} of {total} bytes"
