"""How long a training step takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from infssm._timing import measure
from infssm.learner.optim import build_optimizer, decay_groups, set_learning_rate
from infssm.methods import Batch, Method, TaskInfo, build_method, train_step
from infssm.models import create_model

DEFAULT_METHODS = ("seq", "lwf-ac", "inf-ssm", "inf-ssm-exact")
_CLASSES = 10


class Timing(NamedTuple):
    """Median time of a step of one method."""

    method: str
    milliseconds: float
    images_per_s: float


def time_steps(
    methods: Sequence[str], *, model: str, image_size: int, batch_size: int, steps: int, **options: Any
) -> Iterator[Timing]:
    """Median time of ``steps`` training steps on random images of a second task, method after method."""
    half = _CLASSES // 2
    first, second = TaskInfo(0, range(half)), TaskInfo(1, range(half, _CLASSES))
    for name in methods:
        torch.manual_seed(0)
        network = create_model(model, num_classes=_CLASSES, **options)
        if (resize := getattr(network, "set_input_size", None)) is not None:
            resize(image_size)
        method = build_method(network, name, num_classes=_CLASSES, num_tasks=2)
        shape = (batch_size, 3, image_size, image_size)
        raw, images = torch.randint(256, shape, dtype=torch.uint8), torch.randn(shape)
        labels = torch.randint(half, (batch_size,))
        old, new = Batch(images, labels, raw=raw), Batch(images, labels + half, raw=raw)
        method.begin_task(first, [old])
        method.begin_epoch(0, 1)
        method.loss(old)
        method.end_task(first, [old])
        method.begin_task(second, [new])
        method.begin_epoch(0, 1)
        optimizer = build_optimizer(method.param_groups(decay_groups(method.module, 0.05)))
        set_learning_rate(optimizer, 1e-5)

        def step(method: Method = method, batch: Batch = new, optimizer: torch.optim.Optimizer = optimizer) -> None:
            train_step(lambda: method.loss(batch), optimizer, after_update=method.after_step)

        median = statistics.median(measure(step, steps, warmup=2))
        yield Timing(name, 1000 * median, batch_size / median)
