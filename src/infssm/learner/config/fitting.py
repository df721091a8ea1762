"""A model, an image size, a batch size and a number of tasks for data that come without them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from infssm.data import Dataset, FileImages, SoundFiles, load_dataset

_SAMPLED = 64
"""Files whose size is looked up."""
_TASKS = 5
_BANDS = 40


def fitted(given: Mapping[str, Any], data_root: str | None = None) -> dict[str, Any]:
    """Settings for what ``given`` leaves open: nothing where it names no data, or digits, which have the main job's.

    The choice follows from the size of the images, the number of classes and whether there is a GPU, never from how
    busy the machine is: the same command makes the same run again.

    Args:
        given: nested settings, those that somebody chose alone.
        data_root: where data sets are, unless ``given`` says so.
    """
    data = given.get("data", {})
    data = {"name": data} if isinstance(data, str) else data
    if not isinstance(data, Mapping) or data.get("name") in (None, "digits"):
        return {}
    model = given.get("model", {})
    no_model = isinstance(model, Mapping) and "name" not in model
    no_tasks = "num_tasks" not in data and "tasks" not in data
    if not (no_model or no_tasks):
        return {}
    options = data.get("options")
    dataset = load_dataset(
        str(data["name"]), data.get("root") or data_root, **(options if isinstance(options, Mapping) else {})
    )
    chosen: dict[str, Any] = {"data": {"num_tasks": _tasks(dataset, data.get("by"))} if no_tasks else {}}
    if not no_model:
        return chosen
    if (settings := dataset.modality.settings) is not None:
        if isinstance(dataset.samples, SoundFiles) and "bands" not in data:
            chosen["data"]["bands"] = _BANDS  # shorter than the waveform
        return chosen | deepcopy(dict(settings))
    size, chosen["model"] = _choose_model(_short_side(dataset))
    if data.get("image_size") is None:
        chosen["data"]["image_size"] = size
    chosen["train"] = {
        "batch_size": _batch_size(len(dataset) // max(1, min(_TASKS, dataset.num_classes // 2))),
    }
    return chosen


def _tasks(dataset: Dataset, by: Any) -> int:
    """A task for each domain, where tasks are domains; else two classes or more in each."""
    if (by or dataset.modality.by) != "class":
        return max(1, len(dataset.domains))
    return max(min(2, dataset.num_classes), min(_TASKS, dataset.num_classes // 2))


def _batch_size(images: int) -> int:
    """A power of two from 4 to 32 that leaves about six steps an epoch to a task of so many images, if it can."""
    return int(np.clip(2 ** int(np.log2(max(1, images // 8))), 4, 32))


def _choose_model(pixels: int) -> tuple[int, dict[str, Any]]:
    """Image size and model for images whose short side has so many pixels: 16 to 144 patches, on a GPU 196."""
    if pixels >= 112 and torch.cuda.is_available():
        return 224, {"name": "vim_tiny_patch16_224"}
    for most, patch, width, depth in ((16, 2, 64, 4), (48, 4, 96, 6)):
        if pixels <= most:
            size = max(4 * patch, pixels // patch * patch)
            return size, {"name": "vim_nano", "options": {"patch_size": patch, "embed_dim": width, "depth": depth}}
    return 64, {"name": "vim_nano", "options": {"patch_size": 8, "embed_dim": 96, "depth": 6}}


def _short_side(dataset: Dataset) -> int:
    """Pixels of the images' shorter side, in the median of some."""
    images = dataset.images
    if not isinstance(images, FileImages):
        return min(images.pil(0).size)
    some = np.unique(np.linspace(0, len(images) - 1, _SAMPLED).astype(int))
    sides = [min(size) for index in some if (size := images.size_of(int(index))) is not None]
    return int(np.median(sides)) if sides else 1
