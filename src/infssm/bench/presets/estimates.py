"""What a run would cost: steps, parameters, memory and time, from a few steps on this machine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from infssm._memory import memory_here
from infssm._modality import IMAGES, Modality
from infssm.bench.presets.fast import shorter_measurements
from infssm.data import Batch, Task
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge, to_dict
from infssm.learner.optim.optimizer import build_optimizer, decay_groups
from infssm.learner.setup import Setup, build
from infssm.methods import train_step

_IMAGES = 4
"""Images of the first step, whose time decides how many the timed ones can have."""
_PATIENCE = 0.5
"""Seconds a timed step may take; a whole batch where it is shorter, else times are scaled to the batch."""


@dataclass(frozen=True)
class Estimate:
    """Cost of a run on this machine's CPU. Measuring passes of methods (Fisher, buffers) are not counted.

    tasks: (classes, training, validation, test images, steps) per task. memory: bytes of weights, gradients, optimizer,
    activations of a step and the head's statistics. seconds: training and evaluation. head: name of the head that keeps
    ``statistics`` bytes from task to task, in checkpoints too. modality: of the samples.
    """

    tasks: tuple[tuple[int, int, int, int, int], ...]
    parameters: int
    memory: int
    seconds: float
    head: str
    statistics: int
    modality: Modality = IMAGES

    def fits(self, at_once: int = 1) -> bool:
        """Whether this machine has the memory for so many runs at once, as far as the system tells."""
        there = memory_here()
        return there is None or at_once * self.memory <= there

    @property
    def duration(self) -> str:
        """The seconds in words."""
        return _duration(self.seconds)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return sum(task[-1] for task in self.tasks)

    def __str__(self) -> str:
        lines = [
            f"task {index}: {classes} classes, {train:,} / {val:,} / {test:,} {self.modality.word} to train / validate "
            f"/ test, {steps:,} steps"
            for index, (classes, train, val, test, steps) in enumerate(self.tasks)
        ]
        lines.append(f"{self.parameters:,} parameters, {self.steps:,} steps")
        lines.append(f"about {self.memory / 2**30:.2f} GiB of memory, {_duration(self.seconds)} on this CPU")
        if self.statistics:
            lines.append(f"of it {_size(self.statistics)} of class statistics that {self.head} keeps, no images")
        if (there := memory_here()) and self.memory > there:
            lines.append(f"this machine has {there / 2**30:.2f} GiB: lower train.batch_size, or the run may be killed")
        return "\n".join(lines)


def estimate(config: RunConfig) -> Estimate:
    """Load the data, build model and method, time a few steps of the first and of a later task."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.train.threads or before)
    try:
        return _measure(config)
    finally:
        torch.set_num_threads(before)


def _measure(config: RunConfig) -> Estimate:
    shorter = merge(to_dict(config), {"method": shorter_measurements(config)})
    if config.train.task0 == "plain":  # a shared model has to be trained too, at least once
        shorter["train"]["task0"] = "own"
    setup = build(load_config(shorter), torch.device("cpu"))
    stream, train = setup.stream, config.train
    tasks = [setup.task(index) for index in range(stream.num_tasks)]
    steps = [setup.epochs(task.index) * _steps(setup, task) for task in tasks]
    parameters = sum(p.numel() for p in setup.method.module.parameters())
    first, activations = _time_task(setup, tasks[0])
    later, more = _time_task(setup, tasks[1], after=tasks[0]) if len(tasks) > 1 else (first, activations)
    evaluation = _evaluated(setup, tasks) * _time_forward(setup, tasks[0])
    training = train.batch_size * (steps[0] * first + sum(steps[1:]) * later)
    statistics, first = _kept(setup, tasks[-1])
    copies = 4 + setup.method.needs_states  # weights, gradients, two moments of AdamW, the old model
    return Estimate(
        tuple((len(t.classes), len(t.train), len(t.val), len(t.test), n) for t, n in zip(tasks, steps, strict=True)),
        parameters,
        4 * copies * parameters + int(max(activations, more) * train.batch_size) + statistics + first,
        training + evaluation,
        setup.method.head.name,
        statistics,
        stream.facts.modality,
    )


def _kept(setup: Setup, task: Task) -> tuple[int, int]:
    """Bytes that the head keeps once it was fitted, of statistics (as many after every task) and of the first model."""
    head = setup.method.head
    if not head.fitted:
        return 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a task of a few steps is too short to measure in
        setup.method.end_task(task, [_few(setup, task)])
    state = head.state_dict()
    first = _bytes(state.pop("first", None))
    return _bytes(state), first


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    return sum(map(_bytes, state.values())) if isinstance(state, Mapping) else 0


def _steps(setup: Setup, task: Task) -> int:
    """Steps of an epoch."""
    count = len(setup.train_loader(task, 0))
    return min(count, setup.config.train.limit_batches or count)


def _time_task(setup: Setup, task: Task, *, after: Task | None = None) -> tuple[float, float]:
    """Seconds and bytes of activations per image of a training step."""
    method = setup.method
    batch = _few(setup, task)
    method.module.train()
    if after is not None:
        method.end_task(after, [_few(setup, after)])
    method.begin_task(task, [batch])
    method.begin_epoch(0, 1)
    optimizer = build_optimizer(method.param_groups(decay_groups(method.module, 0.0)))
    counted: dict[int, int] = {}

    def step(batch: Batch) -> None:
        train_step(lambda: method.loss(batch), optimizer, after_update=method.after_step)

    with saved_tensors_hooks(_counting(counted, setup), lambda x: x):
        step(batch)
    start = time.perf_counter()
    step(batch)
    more = int(len(batch) * _PATIENCE / (time.perf_counter() - start))
    timed = _few(setup, task, max(_IMAGES, more // 2 * 2))
    return _seconds(lambda: step(timed)) / len(timed), sum(counted.values()) / len(batch)


def _few(setup: Setup, task: Task, count: int = _IMAGES) -> Batch:
    """Some images of a task as a training batch, at most a whole one."""
    batch = next(iter(setup.train_loader(task, 0)))
    parts = (batch.x, batch.y, batch.soft, batch.raw, batch.index, batch.mask)
    return Batch(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]


def _counting(counted: dict[int, int], setup: Setup) -> Callable[[Tensor], Tensor]:
    """A hook that adds up the storages autograd keeps, but those of parameters."""
    owned = {p.untyped_storage().data_ptr() for p in setup.method.module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            counted[storage.data_ptr()] = storage.nbytes()
        return tensor

    return pack


def _time_forward(setup: Setup, task: Task) -> float:
    """Seconds per image of an evaluation."""
    batch = _few(setup, task, 16)
    x, module = batch.inputs, setup.method.module.eval()
    with torch.no_grad():
        return _seconds(lambda: module(**x) if isinstance(x, Mapping) else module(x)) / len(batch)


def _evaluated(setup: Setup, tasks: list[Task]) -> int:
    """Images evaluated: validation after each epoch, all seen test sets after each task."""
    limit = setup.config.train.limit_batches
    most = None if limit is None else limit * (setup.config.train.eval_batch_size or 2 * setup.config.train.batch_size)

    def size(part: Any) -> int:
        return len(part) if most is None else min(len(part), most)

    tests = [size(setup.stream[j].test) for j in range(len(tasks))]
    return sum(setup.epochs(t.index) * size(t.val) + sum(tests[: t.index + 1]) for t in tasks)


def _seconds(call: Callable[[], object], times: int = 2) -> float:
    call()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def _size(count: int) -> str:
    return f"{count / 2**10:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
