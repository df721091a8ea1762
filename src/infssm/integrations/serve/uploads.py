"""Uploaded files: counted, checked by their contents, and stored under names of our own in a temporary folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from infssm.data.audio import sound_length, sound_rate
from infssm.data.images import FileImages
from infssm.data.npz import read_series
from infssm.errors import DataError
from infssm.integrations.serve.guard import Limits

_FORMATS = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "BMP": ".bmp", "GIF": ".gif", "TIFF": ".tif", "PPM": ".ppm"}
"""Formats that Pillow may try, with the ending of the stored file. Its other readers are never run on an upload."""
_ARCHIVES = (b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b", b"7z\xbc\xaf\x27\x1c", b"Rar!", b"BZh", b"\xfd7zXZ\x00")


class Sample(NamedTuple):
    """An uploaded file.

    Attributes:
        name: what the client calls it. It is shown, never used as a path.
        path: where it is stored.
    """

    name: str
    path: Path

    @property
    def content(self) -> Any:
        """The file of an image or a sound, the values of a series: what a learner learns from."""
        return next(iter(read_series(self.path).values())) if self.path.suffix in (".npy", ".csv") else self.path


def store(files: Sequence[UploadFile], folder: Path, modality: str | None, limits: Limits) -> list[Sample]:
    """Store files as ``0.png``, ``1.jpg`` ... in a folder of their own; HTTPException if one is refused.

    The ending follows from the contents. Archives are not accepted, so nothing is ever unpacked, and neither is SVG.
    """
    if not files:
        raise HTTPException(422, "the request has no file: send at least one in the form field 'files'")
    samples = []
    for number, file in enumerate(files):
        name = file.filename or f"file {number + 1}"
        shown = name if len(name) <= 100 else f"{name[:100]}…"
        if file.size is not None and file.size > limits.file_bytes:
            raise HTTPException(413, f"{shown}: the file is larger than {limits.file_bytes >> 20} MiB")
        head = file.file.read(1024)
        file.file.seek(0)
        if not head:
            raise HTTPException(422, f"{shown}: the file is empty")
        if head.startswith(_ARCHIVES):
            raise HTTPException(415, f"{shown}: archives are not accepted, send the files themselves")
        part = folder / "upload"
        with part.open("wb") as stored:
            shutil.copyfileobj(file.file, stored)
        try:
            find_ending = _image_ending if modality in (None, "images") else _sequence_ending
            ending = find_ending(part, head, limits)
        except HTTPException as refusal:
            raise HTTPException(refusal.status_code, f"{shown}: {refusal.detail}") from None
        samples.append(Sample(name, part.rename(folder / f"{number}{ending}")))
    return samples


def _image_ending(path: Path, head: bytes, limits: Limits) -> str:
    """The ending of an image file that can be read to its last byte; its size is known before it is decoded."""
    if b"<svg" in head.lower():
        raise HTTPException(415, "SVG is not accepted, send a PNG or a JPEG")
    too_large = HTTPException(413, f"the image has more than {limits.pixels // 1_000_000} megapixels")
    try:
        with Image.open(path, formats=list(_FORMATS)) as image:
            width, height = image.size
            ending = _FORMATS[image.format or ""]
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large from None
    except Exception:  # Pillow raises almost anything on damaged headers
        formats = ", ".join(_FORMATS)
        raise HTTPException(415, f"not an image in one of the formats that are accepted ({formats})") from None
    if width * height > limits.pixels:
        raise too_large
    reason = FileImages(path.parent, (path.name,)).why_unreadable(0)
    if reason is not None:
        raise HTTPException(422, f"the image is damaged ({reason.replace(str(path), 'it')})")
    return ending


def _sequence_ending(path: Path, head: bytes, limits: Limits) -> str:
    """The ending of a sound (wav, flac) or of a series (npy, csv), recognized by its first bytes."""
    sound = ".wav" if head.startswith((b"RIFF", b"RIFX")) else ".flac" if head.startswith(b"fLaC") else None
    if sound is None:
        if head.startswith(b"\x93NUMPY"):
            return ".npy"
        if b"\0" in head or b"<" in head:
            raise HTTPException(415, "not a sound (wav, flac) or a series (npy, csv)")
        return ".csv"
    renamed = path.rename(path.with_suffix(sound))  # the reader chooses by the ending
    try:
        length = sound_length(renamed, sound_rate(renamed))
    except DataError as error:
        raise HTTPException(422, str(error).replace(str(renamed), "the sound")) from None
    finally:
        renamed.rename(path)
    if length > limits.sound_values:
        raise HTTPException(413, f"the sound has more than {limits.sound_values // 1_000_000} million samples")
    return sound
