"""A run directory as bytes: what a machine that does not share a folder sends to one that keeps the runs."""

from __future__ import annotations

import io
import json
import zipfile

from infssm._registry import shorten
from infssm.errors import DataError
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.layout import Manifest, digest_of

_LAST = (layout.LAST, layout.RESULT)
"""The checkpoint and the result: they are written last, after the files that they refer to."""
_OWN = (layout.MARKER, layout.CONFIG, layout.REPORT)
"""Not sent: they hold paths of this machine, and the receiver writes its own."""
_UNREADABLE = (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, RuntimeError)
"""Exceptions of zipfile and json for damaged bytes; RuntimeError includes RecursionError and NotImplementedError."""


def pack(run: RunDirectory, known: dict[str, str] | None = None) -> bytes:
    """The files of a run that is not in use as one archive; files with a digest in ``known`` only if they changed.

    ``known`` is brought up to date.
    """
    known = {} if known is None else known
    parcel = io.BytesIO()
    with zipfile.ZipFile(parcel, "w", zipfile.ZIP_STORED) as archive:
        for path in layout.our_files(run.path):
            name = path.relative_to(run.path).as_posix()
            if name in _OWN or layout.is_unfinished_write(path) or not path.is_file():
                continue
            content = path.read_bytes()
            if known.get(name) != (digest := digest_of(content)):
                known[name] = digest
                archive.writestr(name, content)
        archive.writestr(layout.MARKER, json.dumps(sorted(Manifest.read(run.path).files)))
    return parcel.getvalue()


def unpack(run: RunDirectory, parcel: bytes, config: str) -> None:
    """Write the files of a parcel to a run directory, whose configuration is ``config``, as YAML.

    Nothing but files of a run is written, and nothing outside its directory. A process may be killed at any moment:
    the run can be resumed from what was written.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(parcel)) as archive:
            members = archive.infolist()
            foreign = [
                info.filename
                for info in members
                if info.compress_type != zipfile.ZIP_STORED
                or not (layout.is_ours(info.filename) or info.filename == layout.MARKER)
            ]
            files = {} if foreign else {info.filename: archive.read(info) for info in members}
            checked = [] if foreign else json.loads(files.pop(layout.MARKER))
    except _UNREADABLE as error:
        reason = shorten(" ".join(str(error).split()), 200)
        raise DataError(f"what was sent for {run.path} is not a run: {reason}") from None
    if foreign:
        raise DataError(f"what was sent for {run.path} holds {shorten(repr(foreign[0]))}, which is not a file of a run")
    if not isinstance(checked, list) or not all(isinstance(name, str) for name in checked):
        raise DataError(f"what was sent for {run.path} is not a run: its {layout.MARKER} is not a list of names")
    run.check_usable()
    run.make()
    with run.lock():
        Manifest.read(run.path).write(run.path)  # marks the folder as a run before anything else is in it
        run.write_text(layout.CONFIG, config)
        for name in sorted(files, key=lambda name: (_LAST.index(name) + 1 if name in _LAST else 0, name)):
            run.write(name, files[name], checked=name in checked)
