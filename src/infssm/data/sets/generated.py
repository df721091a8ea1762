"""Data sets without a download: scikit-learn's digits, generated images and waves, imitations of real data sets."""

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
from infssm.data.sequences import MeasuredSeries
from infssm.errors import ConfigError

_LOWEST, _OCTAVES = 1.5, 2.0
"""Periods per series of the slowest wave, and how many times the fastest doubles them."""


@register_dataset("digits", summary="handwritten digits, 8x8 grey, embedded (scikit-learn)", classes=10, images=1797)
def digits(root: Path) -> Dataset:  # noqa: ARG001 - every loader takes the root
    """Digits at their own size, one channel; grey levels 0..16 scaled to 0..255."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError("the digits need scikit-learn: pip install 'infssm[bench]'") from error
    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return Dataset("digits", tuple(str(d) for d in range(10)), ArrayImages.from_numpy(pixels), bunch.target)


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


@register_dataset("waves", summary="generated waves of four shapes: tell the frequency, a number (regression)")
def waves(root: Path, *, per_shape: int = 400, steps: int = 48, noise: float = 0.1) -> Dataset:  # noqa: ARG001
    """Shapes are the domains; the target is the frequency in octaves, uniform and standardised to variance 1.

    A quarter of the waves of each shape are the test set. Phase and amplitude are drawn, too.
    """
    rng = np.random.default_rng(0)
    shape = np.arange(4 * per_shape) % 4
    octave = rng.uniform(0, 1, len(shape))
    time = np.arange(steps) / steps
    turns = _LOWEST * 2 ** (_OCTAVES * octave)[:, None] * time
    turns = np.where(shape[:, None] == 3, turns * (0.5 + time), turns) + rng.uniform(0, 1, (len(shape), 1))
    sine = np.sin(2 * np.pi * turns)
    values = np.select(
        [shape[:, None] == 1, shape[:, None] == 2], [np.sign(sine), np.where(turns % 1 < 0.15, 1.0, -0.2)], sine
    )
    values = values * rng.uniform(0.5, 1.5, (len(shape), 1)) + noise * rng.normal(size=values.shape)
    return Dataset(
        "waves",
        ("frequency",),
        MeasuredSeries(values[:, :, None], (octave - 0.5) * np.sqrt(12)),
        np.zeros(len(shape), dtype=np.int64),
        num_test=4 * (per_shape // 4),
        stratified=True,
        domains=("sine", "square", "pulse", "chirp"),
        domain_of=shape,
        domain_word="shape",
    )


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
        per_class: images per class (and per part, if there are two).
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
