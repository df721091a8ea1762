"""Mutated parcels of a run: each is unpacked, or refused with one line."""

from __future__ import annotations

import io
import json
import random
import tempfile
import warnings
import zipfile
from functools import partial
from pathlib import Path

from infssm.errors import InfssmError
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory, unpack
from tests.fuzz import Tally, attempt, conclude

_CONFIG = "seed: 0\ndata: {name: digits}\nmodel: {name: vim_nano}\nmethod: {name: seq}\n"
_NAMES = (layout.ENV, layout.RESULT, layout.MATRIX, layout.LAST, layout.weights_name(0), layout.METRICS)
_ODD = (
    "", ".", "..", "/", "../x", "/etc/x", "checkpoints", "checkpoints/", "checkpoints/task_00.safetensors/x", "a\0b",
    "lock", layout.MARKER, layout.CONFIG, "result.json/", "checkpoints/task_" + "9" * 300 + ".safetensors", "ünïcödé",
    "tensorboard/events.out.tfevents." + "x" * 400, "result.json\0", "C:\\x",
)  # fmt: skip
_MARKERS = (
    b"[]", b"{}", b"null", b"1", b"[[1]]", b"[{}]", b"[null, 1, true]", b'["result.json"]', b"{", b"", b"\xff\xfe",
    b"[" * 100_000, b'"' + b"x" * 1000 + b'"', b"9" * 5000, b'["\\ud800"]',
)  # fmt: skip


def run(count: int, seed: int) -> None:
    """Unpack ``count`` mutated parcels: nothing but our own errors, of one line, and no file outside the folder."""
    rng, tally = random.Random(seed), Tally()
    for number in range(count):
        parcel = _mutated(_parcel(rng), rng)
        with tempfile.TemporaryDirectory(prefix="infssm-fuzz-") as folder:
            attempt(tally, f"case {number} of seed {seed}", partial(_unpack, Path(folder), parcel))
    conclude(tally, "parcels")


def _unpack(folder: Path, parcel: bytes) -> None:
    target = folder / "runs" / "one"
    refusal = ""
    try:
        unpack(RunDirectory(target), parcel, _CONFIG)
    except InfssmError as error:
        refusal = str(error)
    outside = [path for path in folder.rglob("*") if path.is_file() and target not in path.parents]
    assert not outside
    assert "\n" not in refusal
    if refusal:
        raise InfssmError(refusal)


def _parcel(rng: random.Random) -> bytes:
    content = io.BytesIO()
    kind = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(content, "w", kind) as archive:
        for name in rng.sample(_NAMES, rng.randint(0, len(_NAMES))):
            _add(archive, name, rng.randbytes(rng.choice((0, 1, 40, 400))))
        if rng.random() < 0.3:
            _add(archive, rng.choice(_ODD), b"x")
        if rng.random() < 0.9:
            plain = json.dumps(rng.sample(_NAMES, 2)).encode()
            _add(archive, layout.MARKER, plain if rng.random() < 0.7 else rng.choice(_MARKERS))
    return content.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add a member whatever its name, twice under one name too, which zipfile warns of."""
    info = zipfile.ZipInfo("x")
    info.filename, info.compress_type = name, archive.compression
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        archive.writestr(info, content)


def _mutated(parcel: bytes, rng: random.Random) -> bytes:
    changed = bytearray(parcel)
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        how, at = rng.randrange(5), rng.randrange(max(1, len(changed)))
        if how == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif how == 1:
            changed[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\x7f"))
        elif how == 2:
            del changed[at : at + rng.randint(1, 40)]
        elif how == 3:
            changed[at:at] = rng.randbytes(rng.randint(1, 40))
        else:
            field = changed.find(rng.choice((b"PK\1\2", b"PK\3\4", b"PK\5\6")))  # headers of members and of the whole
            if field >= 0:
                place = field + rng.randrange(46)
                changed[place : place + 1] = bytes([rng.randrange(256)])
    return bytes(changed)
