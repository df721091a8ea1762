"""How much memory and how many cores there are for a run, and how long calls take on how many threads."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files in which Linux states the memory limit of a container."""


RUNS_AT_ONCE = "INFSSM_RUNS_AT_ONCE"
"""Environment variable: how many processes carry out runs on this machine at once."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def describe_bytes(size: float) -> str:
    """``1.5 GiB`` and the like."""
    steps = 0
    while size >= 1024 and steps < len(_UNITS) - 1:
        size, steps = size / 1024, steps + 1
    return f"{size:,.1f} {_UNITS[steps]}" if steps else f"{size:.0f} bytes"


def cores_here() -> int:
    """Cores for this process: those it may use, shared with the runs beside it."""
    whole = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, whole // _runs_at_once())


def _runs_at_once() -> int:
    text = os.environ.get(RUNS_AT_ONCE, "")
    return max(1, int(text)) if text.isdigit() else 1


def memory_here() -> int | None:
    """Bytes of memory for this process, shared with the runs beside it; None if unknown.

    The machine's, or less where a container is limited.
    """
    try:
        amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):
        return None
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            amounts.append(int(Path(file).read_text()))
    return min(amounts) // _runs_at_once()


def measure(
    call: Callable[[], object], repeats: int, *, warmup: int = 1, at_least: float = 0.0, at_most: float = math.inf
) -> list[float]:
    """Seconds of each of ``repeats`` calls, after ``warmup`` calls that are not counted.

    Calls continue until they took ``at_least`` seconds together, and end early once they took ``at_most`` seconds.
    """
    for _ in range(warmup):
        call()
    seconds: list[float] = []
    while (len(seconds) < repeats or sum(seconds) < at_least) and sum(seconds) < at_most:
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Let torch use ``count`` threads, or as many as it does where that is None."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
