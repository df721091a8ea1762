"""Images per second of the loader on JPEG files at 224 pixels, beside what the model takes.

    python -m benchmarks.kernels.loading [--images 512] [--batch 16] [--width 500] [--folder DIR]

Without a folder, photograph-like JPEGs, 4 wide to 3 high, are made in a temporary one. `decode` is reading alone, on
one thread: every pixel, and at the half, quarter or eighth that still has the pixels asked for (a JPEG's draft mode,
which the loader uses). The other rows are epochs over all images, with 0, 1 and 2 loader processes: `light` resizes and
keeps decoded copies, `decoded` is a second epoch from these copies, `deit` augments each image anew.
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

from infssm.data import ImageLoader, Recipe, TaskStream, load_dataset, make_recipe, make_split
from infssm.data.images import FileImages
from infssm.models import create_model

SIZE = 224


def make_folder(root: Path, count: int, width: int) -> Path:
    """``count`` images in two classes: coarse shapes, finer texture and noise, as a camera's JPEGs have."""
    rng, shape = np.random.default_rng(0), (width, width * 3 // 4)
    for number in range(count):
        layers = [
            np.asarray(Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize(shape), np.float64)
            for side in (5, 40, shape[1])
        ]
        pixels = sum(weight * layer for weight, layer in zip((0.6, 0.3, 0.1), layers, strict=True))
        target = root / f"class{number % 2}"
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(pixels).astype(np.uint8)).save(target / f"{number:05d}.jpg", quality=90)
    return root


def epoch(stream: TaskStream, recipe: Recipe, batch: int, workers: int) -> float:
    """Images per second of one epoch."""
    loader = ImageLoader(stream[0], recipe=recipe, batch_size=batch, num_workers=workers)
    start = time.perf_counter()
    images = sum(len(x) for x, _ in loader)
    return images / (time.perf_counter() - start)


def decode(folder: Path, at_least: int | None) -> float:
    """Images per second of reading files, in this process."""
    images = load_dataset(str(folder)).images
    assert isinstance(images, FileImages)
    start = time.perf_counter()
    for index in range(len(images)):
        images.pil(index, at_least)
    return len(images) / (time.perf_counter() - start)


def show(label: str, rate: float) -> None:
    print(f"{label:36} {rate:8.1f} images/s", flush=True)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=500, help="of the JPEGs made")
    parser.add_argument("--folder", type=Path, help="a folder of your own, one folder per class")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "cache"
        os.environ["INFSSM_CACHE"] = str(cache)
        folder = options.folder or make_folder(Path(scratch) / "photos", options.images, options.width)
        for label, at_least in (("every pixel", None), ("draft", SIZE)):
            show(f"decode, {label}", decode(folder, at_least))
        for name in ("light", "deit"):
            for workers in (0, 1, 2):
                dataset = load_dataset(str(folder))
                stream, recipe = TaskStream(dataset, make_split(dataset), 1), make_recipe(name, dataset, size=SIZE)
                show(f"{name}, {workers} processes", epoch(stream, recipe, options.batch, workers))
                if name == "light":
                    show(f"decoded, {workers} processes", epoch(stream, recipe, options.batch, workers))
                    for store in (cache / "decoded").glob("*.images"):
                        store.unlink()
    for name in ("vim_tiny_patch16_224", "vim_small_patch16_224"):
        show(f"{name}, training step", step(name, 4))


if __name__ == "__main__":
    main()
