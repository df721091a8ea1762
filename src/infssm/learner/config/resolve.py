"""Fill in what a configuration leaves open, for the data and the machine, before it is hashed and stored."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from infssm.data import Dataset, FileImages, ImageFacts, SoundFiles, load_dataset
from infssm.errors import ConfigError
from infssm.learner.config.fields import LogConfig, MethodConfig, RunConfig
from infssm.learner.config.load import merge
from infssm.learner.devices import settle_precision
from infssm.learner.optim import task_lr
from infssm.methods import list_methods, method_options, parse_name
from infssm.methods.core.build import Composition
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


def resolve(config: RunConfig) -> RunConfig:
    """Decide what a configuration leaves to the machine and the method: threads, precision, task 0, later rates.

    Sums depend on the number of threads in their last digits, so it must not depend on what else is running: models
    called ``..._nano`` get one, in which they are fastest, others all that torch has here.
    """
    train = config.train
    threads = train.threads or (1 if config.model.name.endswith("_nano") else torch.get_num_threads())
    composition = parse_name(config.method.name)
    components = composition.classes
    task0 = train.task0
    options = method_options(config.method.name, config.method.options)
    start_model = any(getattr(option, "start_model", False) for option in options.values())
    if start_model and task0 not in ("train", "own"):
        raise ConfigError(
            f"method.start_model keeps the model before task 0, which train.task0={task0} replaces: use train.task0=own"
        )
    lora = any(getattr(option, "first_session", "all") == "lora" for option in options.values())
    if lora and task0 not in ("train", "own"):
        raise ConfigError(f"method.first_session=lora trains task 0, which train.task0={task0} replaces: leave it out")
    if task0 == "train":  # only by cross-entropy, unless the method needs its own model
        plain = options.get("seq")
        full = getattr(plain, "mask", "current") == "full"  # trains the logits of later classes, in task 0 too
        own = (
            full
            or start_model
            or lora
            or config.data.online
            or any(component.own_first_task for component in components)
        )
        task0 = "own" if own else "plain"
    if config.model.classes == "grow":
        check_growing(config.method.name)
    if config.data.online:
        _check_online(config)
    changes: dict[str, Any] = {"threads": threads, "precision": settle_precision(train), "task0": task0}
    if train.lr_scale is None:
        changes |= _later_rates(composition)
    return config.model_copy(update={"train": train.model_copy(update=changes)})


def check_growing(method: str) -> None:
    """Raise for a method that must know the number of classes before it learns the first."""
    for component in parse_name(method).classes:
        if component.why_needs_total is not None:
            raise ConfigError(
                f"{component.name} cannot be taught new classes at any time, since {component.why_needs_total}: choose "
                "another method, or use it with `infssm run` and model.classes=all"
            )


def _later_rates(composition: Composition) -> dict[str, Any]:
    """The factor on the learning rate of tasks after the first, where none is given.

    The statistics of a fitted head follow the features only as far as a linear map of them does: features that go on
    at the first task's rate leave it behind.
    """
    follows = composition.head.fitted and not (composition.base.freezes or composition.base.joint)
    return {"lr_scale": 0.03, "lr_scale_variant": "once"} if follows else {"lr_scale": 1.0}


def _check_online(config: RunConfig) -> None:
    """Raise for settings and methods that cannot work on one pass without task boundaries."""
    train = config.train
    wrong = {
        "train.epochs=1": train.epochs == 1 and train.task0_epochs in (None, 1),
        "train.task0=own": train.task0 in ("train", "own"),
        "train.mixing=none train.label_smoothing=0": train.mixing == "none" and not train.label_smoothing,
        "train.devices=1": train.devices == 1,
    }
    if fixes := [fix for fix, fits in wrong.items() if not fits]:
        raise ConfigError(f"data.online=true is one pass over a stream in its order: set {' '.join(fixes)}")
    bad = [component.name for component in parse_name(config.method.name).classes if not component.online]
    if bad:
        known = ", ".join(name for name in list_methods() if all(c.online for c in parse_name(name).classes))
        raise ConfigError(
            f"method {bad[0]!r} acts where a task begins or ends, and data.online=true has no such boundaries; "
            f"these methods need none: {known}"
        )


def task0_config(config: RunConfig) -> RunConfig:
    """The configuration that makes the task-0 model of a resolved one whose ``train.task0`` is ``plain``.

    It has plain training for its method, and of the settings of ``train`` only those that act on task 0, so all
    configurations that agree in these have the same one. It reads no test data.
    """
    train = config.train
    own = {
        "task0": "own",
        "epochs": train.task0_epochs or train.epochs,
        "task0_epochs": None,
        "lr": task_lr(train, 0),
        "lr_scale": 1.0,
        "lr_scale_variant": "plain",
    }
    changes = {
        "method": MethodConfig(name="seq"),
        "train": train.model_copy(update=own),
        "data": config.data.model_copy(update={"evaluate": "val"}),
        "benchmark": config.benchmark_name,
        "log": LogConfig(),
    }
    return config.model_copy(update=changes)
