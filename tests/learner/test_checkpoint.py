from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infssm.errors import CheckpointError
from infssm.learner.saving import load_checkpoint, load_newest, previous, save_checkpoint
from tests.compare import identical


def state(value: float) -> dict[str, object]:
    return {"weights": torch.full((64, 64), value), "plain": [1, 2.5, None, {"a": "b"}]}


def value_of(loaded: dict[str, object]) -> float:
    weights = loaded["weights"]
    assert isinstance(weights, torch.Tensor)
    return float(weights.mean())


def test_round_trip(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", state(3.0))
    loaded = load_checkpoint(tmp_path / "a.ckpt")
    assert identical(loaded["weights"], torch.full((64, 64), 3.0))
    assert loaded["plain"] == [1, 2.5, None, {"a": "b"}]


def test_previous_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for value in (1.0, 2.0, 3.0):
        save_checkpoint(path, state(value))
    assert value_of(load_checkpoint(path)) == 3.0
    assert value_of(load_checkpoint(previous(path))) == 2.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "a.ckpt.previous"]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_cut_off_file_is_refused_and_the_previous_serves(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, state(1.0))
    save_checkpoint(path, state(2.0))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match="truncated"):
        load_checkpoint(path)
    loaded, warning = load_newest(path)
    assert value_of(loaded) == 1.0
    assert warning is not None
    assert "truncated" in warning
    assert "a.ckpt.previous" in warning


@pytest.mark.parametrize("position", [100, 2000, -60])
def test_flipped_bit_is_refused(tmp_path: Path, position: int) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, state(1.0))
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path)


def test_missing_without_previous(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        load_newest(tmp_path / "none.ckpt")


class _Explosive:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("code ran",)


def test_code_in_a_checkpoint_never_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "a.ckpt", {"x": _Explosive()})
    with pytest.raises(CheckpointError, match="more than tensors"):
        load_checkpoint(tmp_path / "a.ckpt")
    assert "code ran" not in capsys.readouterr().out


def test_error_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, state(1.0))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        save_checkpoint(path, state(2.0))
    assert "the last good one" in str(error.value)
    assert value_of(load_checkpoint(path)) == 1.0
    assert not list(tmp_path.glob(".*"))


FILL = """
import resource, signal, sys, torch
from pathlib import Path
from infssm.errors import CheckpointError
from infssm.learner.saving import save_checkpoint
path = Path(sys.argv[1])
save_checkpoint(path, {"weights": torch.ones(64, 64)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(path, {"weights": torch.zeros(512, 512)})
except CheckpointError as error:
    print(error)
"""


def test_disk_that_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, check=True)
    assert "cannot save the checkpoint" in done.stdout
    assert "File too large" in done.stdout
    assert value_of(load_checkpoint(path)) == 1.0
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
