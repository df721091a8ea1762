"""Ctrl-C and SIGTERM end a run at the next step, after saving."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from infssm.errors import InfssmError
from infssm.learner.events import Control


class Interrupted(InfssmError):
    """The run was asked to stop and has saved its progress."""

    exit_code = 130


@contextlib.contextmanager
def stop_on_signals(control: Control) -> Iterator[None]:
    """While entered, the first SIGINT or SIGTERM asks ``control`` to stop; a second one acts at once."""
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        control.stop()
        restore()

    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
