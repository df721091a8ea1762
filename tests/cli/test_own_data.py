"""``infssm run data=FOLDER``: says what it chose and how long it takes, stops before it would not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from infssm.bench import timing as _estimate
from infssm.cli.app import invoke


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("ant", "bee", "cat", "dog"):
        (tmp_path / "zoo" / name).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(0, 256, (80, 100, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "zoo" / name / f"{number}.jpg")
    return tmp_path / "zoo"


def settings(folder: Path, out: Path) -> list[str]:
    return ["run", f"data={folder}", "method=seq", "train.epochs=1", "train.batch_size=4", "-o", str(out)]


def test_it_says_what_it_chose(folder: Path, tmp_path: Path, capfd: Any) -> None:
    small = ["model.options.depth=1", "model.options.embed_dim=16"]
    assert invoke([*settings(folder, tmp_path / "runs"), *small]) == 0
    out = capfd.readouterr().out
    assert "28 training images of 4 classes in 2 tasks" in out
    assert "vim_nano (patch_size 8, embed_dim 16, depth 1) at 64 pixels: about" in out
    assert "GiB on this CPU" in out
    assert invoke([*settings(folder, tmp_path / "runs"), *small]) == 0
    assert "training images" not in capfd.readouterr().out, "a complete run is shown, not announced"


def test_it_stops_before_it_would_not_fit(
    folder: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_estimate, "memory_here", lambda: 1000)
    assert invoke([*settings(folder, tmp_path / "runs"), "-q"]) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert "GiB of memory, more than there is: choose a smaller data.image_size, train.batch_size or model" in message
    assert not (tmp_path / "runs").exists()
