"""Generated images: for trying things out, and in the layouts of the real data sets for smoke runs."""

from __future__ import annotations

import itertools
import pickle
import wave
from pathlib import Path
from typing import Any

import numpy as np

from infssm.data.dataset import Dataset
from infssm.data.images import ArrayImages
from infssm.data.registry import register_dataset
from infssm.errors import ConfigError


@register_dataset("synthetic", summary="generated images that can be learnt: a pattern per class, and noise")
def synthetic(root: Path, *, classes: int = 10, per_class: int = 40, size: int = 32, channels: int = 3) -> Dataset:  # noqa: ARG001
    """A fixed random pattern per class with noise on it; a quarter of the images are the test set."""
    test = max(1, per_class // 4)
    shape = (size, size, channels)
    pixels = np.concatenate(
        [make_images(classes, per_class - test, shape, seed=0), make_images(classes, test, shape, seed=1)]
    )
    labels = np.concatenate([np.repeat(np.arange(classes), per_class - test), np.repeat(np.arange(classes), test)])
    names = tuple(f"class{c:03d}" for c in range(classes))
    return Dataset("synthetic", names, ArrayImages.from_numpy(pixels), labels, num_test=classes * test)


def make_images(classes: int, per_class: int, shape: tuple[int, int, int], *, seed: int) -> np.ndarray[Any, Any]:
    """uint8 [classes * per_class, height, width, channels], grouped by class; the seed changes the noise only."""
    height, width, channels = shape
    coarse = np.random.default_rng(12345).integers(0, 256, (classes, 4, 4, channels))
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    patterns = coarse[:, rows][:, :, columns]
    noise = np.random.default_rng(seed).normal(0, 40, (classes, per_class, *shape))
    return (patterns[:, None] + noise).clip(0, 255).astype(np.uint8).reshape(-1, *shape)


def write_synthetic(name: str, root: str | Path, *, per_class: int = 4, size: int = 40) -> Path:
    """Write generated images under ``root`` in the real layout of a data set, for smoke runs of its presets.

    Args:
        name: ``cifar100``, ``imagenet-r``, ``caltech256``, ``cub200``, ``tiny-imagenet-200/train`` or
            ``speech-digits``, whose sounds are tones.
        root: data root to write under.
        per_class: images per class (and per part, where there are two).
        size: height of the images; CIFAR's stay at 32.
    """
    root = Path(root)
    layouts: dict[str, tuple[str, ...]] = {  # folders of classes by data set
        "imagenet-r": ("imagenet-r",),
        "caltech256": ("256_ObjectCategories",),
        "cub200": ("cub200/train", "cub200/test"),
        "tiny-imagenet-200/train": ("tiny-imagenet-200/train",),
    }
    if name == "cifar100":
        return _write_cifar100(root / "cifar-100-python", per_class)
    if name == "speech-digits":
        return _write_tones(root / "fsdd", per_class)
    if name not in layouts:
        raise ConfigError(f"no synthetic layout for {name!r}; there are cifar100, speech-digits, {', '.join(layouts)}")
    from PIL import Image

    names = [f"{c:03d}.class" for c in range(1, 258 if name == "caltech256" else 201)]
    for seed, folder in enumerate(layouts[name]):
        images = make_images(len(names), per_class, (size, size + size // 4, 3), seed=seed)
        for number, image in enumerate(images):
            target = root / folder / names[number // per_class]
            target /= "images" if name.startswith("tiny-imagenet") else ""  # one folder deeper, as published
            target.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(target / f"image{number % per_class:03d}.jpg")
    return root / layouts[name][0].partition("/")[0]


def _write_cifar100(folder: Path, per_class: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, part in enumerate(("train", "test")):
        pixels = make_images(100, per_class, (32, 32, 3), seed=seed).transpose(0, 3, 1, 2).reshape(-1, 3072)
        labels = np.repeat(np.arange(100), per_class).tolist()
        with (folder / part).open("wb") as file:
            pickle.dump({b"data": np.ascontiguousarray(pixels), b"fine_labels": labels}, file, protocol=2)
    with (folder / "meta").open("wb") as file:
        pickle.dump({b"fine_label_names": [f"class{c}".encode() for c in range(100)]}, file, protocol=2)
    return folder


def _write_tones(folder: Path, per_class: int) -> Path:
    """A tone per digit, a second one per speaker; recordings 0 to 4 are the test set."""
    folder.mkdir(parents=True, exist_ok=True)
    for (s, speaker), digit, take in itertools.product(enumerate(("ann", "bob")), range(10), range(1, per_class + 5)):
        time = np.arange(300 + 20 * take) / 8000
        tone = np.sin(2 * np.pi * 200 * (1 + digit) * time) + 0.5 * np.sin(2 * np.pi * (3000 + 500 * s) * time)
        with wave.open(str(folder / f"{digit}_{speaker}_{take}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes((10000 * tone).astype("<i2").tobytes())
    return folder
