"""How much a request may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on requests; one that goes beyond is refused with a 4xx status that names the bound.

    Attributes:
        request_bytes: bytes of a request with files. They are written to disk while they arrive.
        json_bytes: bytes of any other request. These are held in memory.
        file_bytes: bytes of one file.
        files: files of a request.
        pixels: pixels of an image, read from its header before anything is decoded.
        sound_values: samples of a sound, times its channels, read from its header.
        requests: requests in progress at once.
        waiting: changes (lessons, for instance) that wait for the one in progress.
        seconds: time in which a request must have arrived in full.
    """

    request_bytes: int = 256 << 20
    json_bytes: int = 64 << 10
    file_bytes: int = 64 << 20
    files: int = 500
    pixels: int = 64_000_000
    sound_values: int = 64_000_000
    requests: int = 64
    waiting: int = 16
    seconds: float = 300.0
