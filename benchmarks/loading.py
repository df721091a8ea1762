"""Images per second of the loader on JPEG files at 224 pixels, beside what the model takes.

    python -m benchmarks.loading [--images 512] [--batch 16] [--folder DIR]

Without a folder, photograph-like JPEGs of 500 x 375 are made in a temporary one. Each row is one epoch over all images;
`decoded` is a second epoch, from the decoded copies that the first has kept.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from infssm.data import Recipe, TaskStream, load_dataset, make_loader, make_recipe, make_split
from infssm.models import create_model

SIZE = 224


def make_folder(root: Path, count: int) -> Path:
    """``count`` images in two classes: coarse shapes, finer texture and noise, as a camera's JPEGs have."""
    rng = np.random.default_rng(0)
    for number in range(count):
        layers = [
            np.asarray(
                Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize((500, 375)), np.float64
            )
            for side in (5, 40, 375)
        ]
        pixels = sum(weight * layer for weight, layer in zip((0.6, 0.3, 0.1), layers, strict=True))
        target = root / f"class{number % 2}"
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(pixels).astype(np.uint8)).save(target / f"{number:05d}.jpg", quality=90)
    return root


def epoch(stream: TaskStream, recipe: Recipe, batch: int, workers: int) -> float:
    """Images per second of one epoch."""
    loader = make_loader(stream[0], recipe=recipe, batch_size=batch, num_workers=workers)
    start = time.perf_counter()
    images = sum(len(x) for x, _ in loader)
    return images / (time.perf_counter() - start)


def step(name: str, batch: int) -> float:
    """Images per second of training steps of a model: forward and backward, best of two."""
    model = create_model(name, num_classes=10)
    x, y = torch.randn(batch, 3, SIZE, SIZE), torch.zeros(batch, dtype=torch.int64)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        best = max(best, batch / (time.perf_counter() - start))
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="a folder of your own, one folder per class")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["INFSSM_CACHE"] = str(Path(scratch) / "cache")
        folder = options.folder or make_folder(Path(scratch) / "photos", options.images)
        dataset = load_dataset(str(folder))
        stream = TaskStream(dataset, make_split(dataset), 1)
        for name in ("light", "deit"):
            recipe = make_recipe(name, dataset, size=SIZE)
            for workers in dict.fromkeys((0, cores)):
                print(f"{name:6} {workers} processes {epoch(stream, recipe, options.batch, workers):10.0f} images/s")
                if name == "light":
                    print(f"{name:6} decoded     {epoch(stream, recipe, options.batch, 0):10.0f} images/s")
                    for store in (Path(scratch) / "cache" / "decoded").glob("*.images"):
                        store.unlink()
                    dataset = load_dataset(str(folder))
                    stream = TaskStream(dataset, stream.split, 1)
    for name in ("vim_tiny_patch16_224", "vim_small_patch16_224"):
        print(f"{name} step {step(name, 4):14.1f} images/s")


if __name__ == "__main__":
    main()
