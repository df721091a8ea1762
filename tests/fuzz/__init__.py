"""Fuzzers: damaged or hostile files must end in one of infssm's own errors, within ten seconds.

A fuzzer is a module here with ``run(count: int, seed: int) -> None``, which calls :func:`attempt` for each case.
``python -m tests.fuzz [NAME...] --count N --seed S`` runs them; the suite runs a few cases of each.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from infssm.errors import InfssmError

LIMIT = 10
"""Seconds that a case may take."""


class TooSlowError(BaseException):
    """A case took longer than the limit; not an Exception, so that no reader can mistake it for a damaged file."""


@dataclass
class Tally:
    """What happened to the cases so far."""

    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    failures: list[str] = field(default_factory=list)


def attempt(tally: Tally, case: str, read: Callable[[], Any]) -> None:
    """Call ``read`` and count its end: accepted, refused with one of infssm's errors, or a failure of the reader."""
    began = time.monotonic()
    try:
        with _limited():
            read()
        tally.accepted += 1
    except InfssmError as error:
        tally.refused += 1
        if "Traceback" in str(error):
            tally.failures.append(f"{case}: a traceback in the message: {error}")
    except (Exception, TooSlowError) as error:
        tally.failures.append(f"{case}: {type(error).__name__}: {error}")
    tally.slowest = max(tally.slowest, time.monotonic() - began)


def conclude(tally: Tally, name: str) -> None:
    """Print one line about a fuzzer, and raise AssertionError where a case failed."""
    sys.stdout.write(
        f"{name}: {tally.accepted + tally.refused + len(tally.failures):,} cases, {tally.accepted:,} read, "
        f"{tally.refused:,} refused, {len(tally.failures):,} failed, slowest {tally.slowest:.2f} s\n"
    )
    assert not tally.failures, "\n".join(tally.failures[:20])


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlowError(f"longer than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
