"""Runs that die of a real signal, each in a process of its own.

The processes are forked from one that has the library imported and has computed nothing (no thread pool that a fork
could cut in half), so that each costs little more than its steps.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from infssm.bench.running import run
from infssm.learner.config.fields import RunConfig
from infssm.learner.events import Interrupted
from infssm.learner.loop import Loop

PRELOADED = [__name__, "lightning_fabric", "sklearn.datasets", "tests.learner.test_resume"]
PATIENCE = 120
"""Seconds after which a process counts as hung: some hundred times what it needs."""


def run_and_die(config: RunConfig, arm: Callable[..., None], *args: Any) -> int:
    """Run in another process that first calls ``arm(*args)``, which arranges its end; its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_run, args=(config, arm, *args), daemon=True)
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail(f"the process neither ended nor died within {PATIENCE} s")
    code: int = process.exitcode
    process.close()
    return code


def _run(config: RunConfig, arm: Callable[..., None], *args: Any) -> None:
    arm(*args)
    try:
        run(config, quiet=True)
    except Interrupted as error:
        sys.exit(error.exit_code)


def in_step(step: int, number: int = signal.SIGKILL) -> None:
    """Send this process the signal inside the given step of the run: weights updated, the method not told yet."""
    original = Loop.step

    def hit(self: Loop, *args: Any) -> Any:
        if self.progress.position.at == step:
            method, told = self.setup.method, self.setup.method.after_step
            method.after_step = lambda: (os.kill(os.getpid(), number), told())[1]  # type: ignore[method-assign,func-returns-value]
        return original(self, *args)

    Loop.step = hit  # type: ignore[method-assign]


def in_call(name: str, nth: int) -> None:
    """Kill this process right before the ``nth`` call of a function of ``os``."""
    original, calls = getattr(os, name), 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(os, name, counted)
