"""What a configuration leaves open, decided before it is hashed and stored."""

from __future__ import annotations

from typing import Any

import torch

from infssm.errors import ConfigError
from infssm.learner.config.fields import LogConfig, MethodConfig, RunConfig
from infssm.learner.devices import settle_precision
from infssm.learner.optim import task_lr
from infssm.methods import list_methods, method_options, parse_name
from infssm.methods.core.build import Composition


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
    if task0 == "train":  # by cross-entropy alone, unless the method needs a model of its own
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
    for component in components if config.model.classes == "grow" else ():
        if component.needs_total:
            raise ConfigError(
                f"{component.name} cannot be taught new classes at any time, since {component.needs_total}: choose "
                "another method, or use it with `infssm run` and model.classes=all"
            )
    if config.data.online:
        _check_online(config)
    changes: dict[str, Any] = {"threads": threads, "precision": settle_precision(train), "task0": task0}
    if train.lr_scale is None:
        changes |= _later_rates(composition)
    return config.model_copy(update={"train": train.model_copy(update=changes)})


def _later_rates(composition: Composition) -> dict[str, Any]:
    """The factor on the learning rate of tasks after the first, where none is given.

    The statistics of a fitted head follow the features only as far as a linear map of them does: features that go on
    at the first task's rate leave it behind.
    """
    follows = composition.head.fitted and not (composition.base.freezes or composition.base.joint)
    return {"lr_scale": 0.03, "lr_scale_variant": "once"} if follows else {"lr_scale": 1.0}


def _check_online(config: RunConfig) -> None:
    """Raise for settings and methods that cannot work on one pass without told boundaries."""
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
            f"method {bad[0]!r} acts where a task begins or ends, and with data.online=true no such boundary is told; "
            f"these need none: {known}"
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
