"""One process per run directory."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infssm.errors import ConfigError
from infssm.learner.store.layout import locked

HOLD = "import sys; from pathlib import Path; from infssm.learner.store.layout import locked\n"
WAIT = HOLD + "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def hold(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_dies(tmp_path: Path) -> None:
    with hold(tmp_path) as process:
        for _ in range(3):
            with pytest.raises(ConfigError) as refusal, locked(tmp_path):
                pass
            assert f"in use by process {process.pid} on {socket.gethostname()}" in str(refusal.value)
        process.kill()
        process.wait()
        assert json.loads((tmp_path / "lock").read_text())["pid"] == process.pid  # stale
        with locked(tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        assert (tmp_path / "lock").read_text() == ""


def test_loader_processes_do_not_keep_the_lock_of_a_dead_run(tmp_path: Path) -> None:
    """A forked process inherits open files, and a lock on one would live as long as it does."""
    code = HOLD + "import os, signal, time\nwith locked(Path(sys.argv[1])):\n"
    code += "    if os.fork() == 0: time.sleep(30)\n    else: time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True) as process:
        process.wait()
        try:
            with locked(tmp_path):
                pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_two_runs_of_one_process(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("host", "pid", "refused"),
    [
        (socket.gethostname(), os.getpid(), True),
        (socket.gethostname(), 2**22 + 1, False),  # above the largest number a process can have
        ("elsewhere", 1, True),
    ],
    ids=["living", "dead", "elsewhere"],  # the process number would make the names of tests differ between workers
)
def test_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, pid: int, refused: bool
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with locked(tmp_path):
        pass
    (tmp_path / "lock.held").write_text(f"{pid}\n{host}\n")
    if refused:
        with pytest.raises(ConfigError, match=r"in use by another process.* delete .*lock\.held"), locked(tmp_path):
            pass
    else:
        with locked(tmp_path):
            pass


def test_place_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*lock"), locked(tmp_path):
        pass
