"""How long a training step takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from infssm._timing import measure
from infssm.learner.optim.optimizer import build_optimizer, decay_groups, set_learning_rate
from infssm.methods import Batch, TaskInfo, build_method, train_step
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
    for name in methods:
        yield _time(name, model, image_size, batch_size, steps, options)


def _time(name: str, model: str, size: int, batch_size: int, steps: int, options: dict[str, Any]) -> Timing:
    torch.manual_seed(0)
    network = create_model(model, num_classes=_CLASSES, **options)
    if (resize := getattr(network, "set_input_size", None)) is not None:
        resize(size)
    method = build_method(network, name, num_classes=_CLASSES, num_tasks=2)
    half = _CLASSES // 2
    raw = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8)
    images, labels = torch.randn(batch_size, 3, size, size), torch.randint(half, (batch_size,))
    first, second = TaskInfo(0, range(half)), TaskInfo(1, range(half, _CLASSES))
    method.begin_task(first, [Batch(images, labels, raw=raw)])
    method.begin_epoch(0, 1)
    method.loss(Batch(images, labels, raw=raw))
    method.end_task(first, [Batch(images, labels, raw=raw)])
    batch = Batch(images, labels + half, raw=raw)
    method.begin_task(second, [batch])
    method.begin_epoch(0, 1)
    optimizer = build_optimizer(method.param_groups(decay_groups(method.module, 0.05)))
    set_learning_rate(optimizer, 1e-5)
    median = statistics.median(
        measure(
            lambda: train_step(lambda: method.loss(batch), optimizer, after_update=method.after_step), steps, warmup=2
        )
    )
    return Timing(name, 1000 * median, batch_size / median)
