"""Teaching, predicting, loading and storing, with Vim-nano and images of 64 pixels a side on one core."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.pages import markdown_table, remembered
from infssm import Learner

CLASSES, IMAGES, REPEATS = 10, 50, 7


def photos(label: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Coloured blocks with noise: what is in the images makes no difference to the time."""
    blocks = np.kron(np.random.default_rng(label).integers(0, 255, (8, 8, 3)), np.ones((8, 8, 1)))
    return np.clip(blocks + rng.normal(0, 40, (IMAGES, 64, 64, 3)), 0, 255).astype(np.uint8)


def measure() -> dict[str, float]:
    """Seconds of processor time, the median of seven, and bytes."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "learner"
        # The weights make no difference to the time, so random ones stand for a pre-trained backbone that stays frozen.
        learner = Learner("vim_nano", folder=folder, settings={"train": {"task0": "skip"}})
        first = np.concatenate([photos(label, rng) for label in range(CLASSES)])
        learner.learn(first, [f"class {label}" for label in np.repeat(np.arange(CLASSES), IMAGES)])
        width = learner.classifier.model.num_features
        before = _files(folder)
        teach = []
        for label in range(CLASSES, CLASSES + REPEATS):
            images = photos(label, rng)
            teach.append(_seconds(lambda images=images, label=label: learner.learn(images, f"class {label}")))
            if label == CLASSES:
                after = _files(folder)
        image = photos(3, rng)[0]
        return {
            "teach": float(np.median(teach)),
            "predict": float(np.median([_seconds(lambda: learner.predict(image)) for _ in range(5 * REPEATS)])),
            "load": float(np.median([_seconds(lambda: Learner.load(folder)) for _ in range(REPEATS)])),
            "folder_bytes": sum(before.values()),
            "version_bytes": sum(after.values()) - sum(before.values()),
            # Mean and lower triangle of the covariance in float64, and features of ten held-out images in float32.
            "class_bytes": 8 * (width + width * (width + 1) // 2) + 4 * (IMAGES // 5) * width,
        }


def _files(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def _seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def run(data_root: Path, out: Path) -> dict[str, Any]:  # noqa: ARG001 - generated images
    return cast(dict[str, Any], remembered(out / "speed.json", measure))


def table(found: dict[str, Any]) -> list[str]:
    own, folder = found["class_bytes"], found["folder_bytes"]
    rest = found["version_bytes"] - own
    added = [f"{size / 1024:.0f} KiB, {100 * size / folder:.1f} %" for size in (own, rest)]
    rows = [
        [f"teach {IMAGES} images of a new class", f"{found['teach']:.2f} s", "1 s"],
        ["one prediction", f"{1e3 * found['predict']:.1f} ms", "10 ms"],
        ["load the folder", f"{found['load']:.2f} s", "2 s"],
        [f"folder of {CLASSES} classes", f"{folder / 2**20:.2f} MiB", ""],
        ["one more version with a new class: statistics of the class", added[0], ""],
        ["and everything else", added[1], "1 %"],
    ]
    return markdown_table(["what", "measured", "aim"], rows, numbers=2)
