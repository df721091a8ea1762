"""How much memory there is."""

from __future__ import annotations

import math
import os
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux tells a container how much it may use."""


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
