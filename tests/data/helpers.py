"""Small data sets for the tests of this package."""

import numpy as np
import torch

from infssm.data import ArrayImages, Dataset, TaskStream, make_split


def fake(count, classes, num_test=0, *, size=1, channels=1, name="fake") -> Dataset:
    """``count`` images, labels 0..classes-1 in turn, pixel values that tell the index."""
    values = torch.arange(count * channels * size * size) * 7919 % 251
    pixels = values.to(torch.uint8).view(count, channels, size, size)
    return Dataset(
        name, tuple(f"c{k}" for k in range(classes)), ArrayImages(pixels), np.arange(count) % classes, num_test
    )


def fake_stream(count=120, classes=4, num_tasks=2, *, size=8, channels=3, num_test=40) -> TaskStream:
    dataset = fake(count, classes, num_test, size=size, channels=channels)
    return TaskStream(dataset, make_split(dataset), num_tasks)
