"""A model, an image size, a batch size and a number of tasks for data that come without them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from infssm.data import Dataset, FileImages, ImageFacts, SoundFiles, load_dataset
from infssm.learner.config.load import merge
from infssm.methods import parse_name
from infssm.models.pretrained import PACKAGED_FOR

_SAMPLED = 64
"""Image files whose size is read."""
_TASKS = 5
_BANDS = 40


def fitted(given: Mapping[str, Any], data_root: str | None = None) -> dict[str, Any]:
    """Settings for what ``given`` leaves open: none where it names no data, or digits, which have the main job's.

    The choice follows from the size of the images, the number of classes and whether there is a GPU, never from how
    busy the machine is: the same command makes the same run again. Naming the model that would be chosen anyway,
    without options, changes nothing.

    Args:
        given: nested settings, only those that the user chose.
        data_root: where data sets are, unless ``given`` says so.
    """
    data, model = (
        {"name": section} if isinstance(section, str) else section
        for section in (given.get("data", {}), given.get("model", {}))
    )
    if not isinstance(data, Mapping) or data.get("name") in (None, "digits"):
        return {}
    open_model = isinstance(model, Mapping) and ("name" not in model or model.keys() == {"name"})
    open_tasks = "num_tasks" not in data and "tasks" not in data
    if not (open_model or open_tasks):
        return {}
    options = data.get("options")
    dataset = load_dataset(
        str(data["name"]), data.get("root") or data_root, **(options if isinstance(options, Mapping) else {})
    )
    tasks: dict[str, Any] = {}
    if open_tasks and (data.get("by") or dataset.modality.by) != "class":
        tasks["num_tasks"] = max(1, len(dataset.domains))
    elif open_tasks:  # two classes or more in each task
        tasks["num_tasks"] = max(min(2, dataset.num_classes), min(_TASKS, dataset.num_classes // 2))
    chosen = model_settings(dataset)
    if not open_model or model.get("name") not in (None, chosen["model"]["name"]):
        return {"data": tasks}
    fixed = {key for key in ("bands", "image_size") if key in data and (key == "bands" or data[key] is not None)}
    return chosen | {"data": tasks | {key: value for key, value in chosen["data"].items() if key not in fixed}}


def settings_for(dataset: Dataset, given: Mapping[str, Any]) -> tuple[dict[str, Any], ImageFacts | None]:
    """Settings of a learner whose first lesson is a data set, and what its images are like if weights decide that.

    A backbone that stays frozen should have seen more than the few images of a first lesson, so it gets packaged
    weights unless ``given`` names a model or weights.
    """
    if "name" in given["model"]:
        return dict(given), None
    facts, freezes = dataset.facts, parse_name(given["method"]["name"]).base.freezes
    if not freezes or "weights" in given["model"] or not isinstance(facts, ImageFacts):
        return merge(model_settings(dataset), given), None
    like_letters = facts.channels == 1 and (facts.height or 32) <= 16
    found, images = with_packaged(given, "omniglot" if like_letters else "cifar100-base")
    return merge({"train": {"task0": "skip"}}, found), images


def with_packaged(given: Mapping[str, Any], weights: str) -> tuple[dict[str, Any], ImageFacts]:
    """Settings with weights that come with infssm, the model that they are for, and what its images are like."""
    model, (channels, size) = PACKAGED_FOR[weights]
    packaged = {"model": {**model, "weights": weights}, "data": {"image_size": size}}
    return merge(packaged, given), ImageFacts(weights, channels, size, size)


def model_settings(dataset: Dataset) -> dict[str, Any]:
    """Sections ``data``, ``model`` and ``train`` for a data set: 16 to 144 patches of an image, on a GPU 196."""
    if (settings := dataset.modality.settings) is not None:
        shorter = {"bands": _BANDS} if isinstance(dataset.samples, SoundFiles) else {}
        return {"data": shorter, **deepcopy(dict(settings))}
    images = dataset.images
    model: dict[str, Any]
    if isinstance(images, FileImages):
        some = np.unique(np.linspace(0, len(images) - 1, _SAMPLED).astype(int))
        sides = [min(found) for index in some if (found := images.size_of(int(index))) is not None]
        pixels = int(np.median(sides)) if sides else 1
    else:
        pixels = min(images.pil(0).size)
    if pixels >= 112 and torch.cuda.is_available():
        size, model = 224, {"name": "vim_tiny_patch16_224"}
    else:
        patch, width, depth = (2, 64, 4) if pixels <= 16 else (4, 96, 6) if pixels <= 48 else (8, 96, 6)
        size = 64 if pixels > 48 else max(4 * patch, pixels // patch * patch)
        model = {"name": "vim_nano", "options": {"patch_size": patch, "embed_dim": width, "depth": depth}}
    # A power of two from 4 to 32 that gives a task about six steps an epoch, if it can.
    per_task = len(dataset) // max(1, min(_TASKS, dataset.num_classes // 2))
    batch_size = int(np.clip(2 ** int(np.log2(max(1, per_task // 8))), 4, 32))
    return {"data": {"image_size": size}, "model": model, "train": {"batch_size": batch_size}}
