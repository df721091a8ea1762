"""Ctrl-C and SIGTERM end a run at the next step, after saving."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from infssm.errors import InfssmError


class Interrupted(InfssmError):
    """The run was told to stop and has saved where it stands."""

    exit_code = 130


class Signals:
    """While entered, the first SIGINT or SIGTERM only sets :attr:`pending`; a second one acts at once."""

    def __init__(self) -> None:
        self.pending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        self.pending = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
