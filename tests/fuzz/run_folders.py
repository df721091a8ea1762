"""Damaged folders of trained runs, as someone may share them: using one gives predictions or an error of ours.

Checksums are written anew after the damage, or removed, as whoever means harm would do.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from infssm.bench.running import run as train
from infssm.learner.hub import HubClassifier
from infssm.learner.store.directory import RunDirectory
from tests.fuzz import Tally, attempt, conclude
from tests.fuzz._mutation import mutate
from tests.learner.tiny import tiny_config

_VALUES: list[Any] = [None, True, "", "x", -1, 0, 2**31, 10**12, 1e308, float("nan"), [], [[1]], {}, {"a": 1}, "../x"]


def run(count: int, seed: int) -> None:
    """Load ``count`` damaged folders and classify an image with each that loads."""
    rng, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory(prefix="infssm-fuzz-") as work:
        good, bad = Path(work) / "good", Path(work) / "bad"
        HubClassifier(train(tiny_config(Path(work) / "runs"), quiet=True).path).save_pretrained(good)
        for number in range(count):
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            _damage(bad, rng)
            attempt(tally, f"case {number} of seed {seed}", partial(_use, bad))
    conclude(tally, "run_folders")


def _use(folder: Path) -> None:
    HubClassifier.from_pretrained(str(folder)).predict(np.zeros((8, 8), np.uint8))


def _damage(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"))
    action = rng.random()
    if action < 0.1:
        file.unlink()
    elif action < 0.5 and file.suffix == ".json":
        values = json.loads(file.read_text())
        _change(values, rng)
        file.write_text(json.dumps(values))
    else:
        file.write_bytes(mutate(file.read_bytes(), rng))
    marker = folder / "run.json"
    if file == marker:
        return
    if rng.random() < 0.5:
        marker.unlink()
    elif file.exists():
        name = file.relative_to(folder).as_posix()
        RunDirectory(folder)._expect(name, file.read_bytes())


def _change(values: Any, rng: random.Random) -> None:
    """Replace or remove one value, at any depth."""
    keys = list(values) if isinstance(values, dict) else list(range(len(values)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(values[key], (dict, list)) and values[key] and rng.random() < 0.7:
        _change(values[key], rng)
    elif rng.random() < 0.2:
        del values[key]
    else:
        values[key] = rng.choice(_VALUES)
