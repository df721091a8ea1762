"""How much memory there is."""

from __future__ import annotations

import math
import os
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux tells a container how much it may use."""


_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def describe_bytes(size: float) -> str:
    """``1.5 GiB`` and the like."""
    steps = 0
    while size >= 1024 and steps < len(_UNITS) - 1:
        size, steps = size / 1024, steps + 1
    return f"{size:,.1f} {_UNITS[steps]}" if steps else f"{size:.0f} bytes"


def memory_here() -> int | None:
    """Bytes of memory this process may use: the machine's, or less where a container is limited; None if unknown."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return min([whole, *map(_limit, _LIMITS)], key=lambda amount: math.inf if amount is None else amount)


def _limit(file: str) -> int | None:
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
