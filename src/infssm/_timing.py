"""How long calls take, and on how many threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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
