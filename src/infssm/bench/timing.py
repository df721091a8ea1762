"""How long a training step takes on this machine, and what a run would cost: steps, parameters, memory and time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from infssm._batch import model_input, run_model
from infssm._machine import describe_bytes, measure, memory_here, num_threads
from infssm._modality import IMAGES, Modality
from infssm.bench.presets.plan import shorter_measurements
from infssm.data import Batch, Task
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge, to_dict
from infssm.learner.optim import build_optimizer, decay_groups, set_learning_rate
from infssm.learner.setup import Setup, build
from infssm.methods import Method, TaskInfo, build_method, train_step
from infssm.methods.core.head import FittedHead
from infssm.methods.regularizers.self_replay import SelfReplay
from infssm.models import create_model

DEFAULT_METHODS = ("seq", "lwf-ac", "inf-ssm", "inf-ssm-exact")
_CLASSES = 10
_IMAGES = 4
"""Images of the first step, whose time decides how many the timed ones can have."""
_PATIENCE = 0.5
"""Seconds a timed step may take; a whole batch where it is shorter, else times are scaled to the batch."""


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


@dataclass(frozen=True)
class Estimate:
    """Cost of a run on this machine's CPU. Measuring passes of methods (Fisher, buffers) are not counted.

    Attributes:
        title: method, data, model and seed in one line.
        tasks: (classes, training, validation, test images, steps) per task.
        parameters: number of parameters of the model.
        memory: bytes of weights, gradients, optimizer, old model, activations of a step, the head's statistics and what
            the old model generates.
        seconds: training and evaluation.
        head: name of the head, which keeps ``statistics`` bytes from task to task, in checkpoints too.
        modality: modality of the samples.
        generated: bytes of sequences that the old model generates for each later task, and the seconds that takes,
            which are among ``seconds``.
    """

    title: str
    tasks: tuple[tuple[int, int, int, int, int], ...]
    parameters: int
    memory: int
    seconds: float
    head: str
    statistics: int
    modality: Modality = IMAGES
    generated: tuple[int, float] = (0, 0.0)

    def fits(self, at_once: int = 1) -> bool:
        """Whether this machine has the memory for so many runs at once, as far as the system reports it."""
        there = memory_here()
        return there is None or at_once * self.memory <= there

    @property
    def duration(self) -> str:
        """The seconds as text with a unit."""
        if self.seconds < 120:
            return f"{self.seconds:.0f} s"
        return f"{self.seconds / 60:.0f} min" if self.seconds < 7200 else f"{self.seconds / 3600:.1f} h"

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return sum(task[-1] for task in self.tasks)

    def __str__(self) -> str:
        lines = [
            f"task {number}: {classes} classes, {train:,} / {val:,} / {test:,} {self.modality.word} to train / "
            f"validate / test, {steps:,} steps"
            for number, (classes, train, val, test, steps) in enumerate(self.tasks, start=1)
        ]
        lines.append(f"{self.parameters:,} parameters, {self.steps:,} steps")
        lines.append(f"about {self.memory / 2**30:.2f} GiB of memory, {self.duration} on this CPU")
        if self.statistics:
            kept = describe_bytes(self.statistics)
            lines.append(f"of it {kept} of class statistics that {self.head} keeps, no images")
        if self.generated[0]:
            size = describe_bytes(self.generated[0])
            lines.append(
                f"{size} of sequences, and logits on them, that the old model generates for each later task, in "
                f"{self.generated[1]:.1f} s"
            )
        if (there := memory_here()) and self.memory > there:
            lines.append(f"this machine has {there / 2**30:.2f} GiB: lower train.batch_size, or the run may be killed")
        return "\n".join(lines)


def estimate(config: RunConfig) -> Estimate:
    """Load the data, build model and method, time a few steps of the first and of a later task."""
    values = merge(to_dict(config), {"method": shorter_measurements(config)})
    if config.train.task0 == "plain":  # a shared model has to be trained too, at least once
        values["train"]["task0"] = "own"
    with num_threads(config.train.threads):
        return _measure(build(load_config(values), torch.device("cpu")))


def _measure(setup: Setup) -> Estimate:
    train, method, stream = setup.config.train, setup.method, setup.stream
    tasks = [setup.task(index) for index in range(stream.num_tasks)]
    batches = [len(setup.train_loader(task, 0)) for task in tasks]
    steps = [setup.epochs(t.index) * min(n, train.limit_batches or n) for t, n in zip(tasks, batches, strict=True)]
    parameters = sum(p.numel() for p in method.module.parameters())

    first, activations = _time_step(setup, tasks[0])
    later = first
    if len(tasks) > 1:
        method.end_task(tasks[0], [_few(setup, tasks[0])])
        later, more = _time_step(setup, tasks[1])
        activations = max(activations, more)
    generated = (0, 0.0)  # by the old model, for each later task
    for component in method.regularizers:
        if isinstance(component, SelfReplay) and component.sequences is not None:
            size = _bytes(component.sequences) + _bytes(component.logits)
            generated = (size, measure(component.generate, 1, warmup=0)[0])
    training = steps[0] * first + sum(steps[1:]) * later

    batch, module = _few(setup, tasks[0], 16), method.module.eval()
    with torch.no_grad():
        seconds = measure(lambda: run_model(module, model_input(batch)), 2)

    def evaluated(part: Any) -> int:
        most = train.limit_batches and train.limit_batches * (train.eval_batch_size or 2 * train.batch_size)
        return min(len(part), most or len(part))

    tests = [evaluated(stream[task.index].test) for task in tasks]
    images = sum(setup.epochs(t.index) * evaluated(t.val) + sum(tests[: t.index + 1]) for t in tasks)

    kept = {}  # by the head, after the last task: statistics of every class, so it is given an image of each
    if isinstance(method.head, FittedHead):
        labels = torch.arange(method.head.num_classes)
        rows = labels % len(batch)
        every = Batch(batch.x[rows], labels, mask=None if batch.mask is None else batch.mask[rows])
        method.head.end_task(TaskInfo.of(tasks[-1]), [every])
        kept = method.head.state_dict()
    first_model = _bytes(kept.pop("first", None))
    copies = 4 + method.needs_old  # weights, gradients, two moments of AdamW, the old model
    memory = 4 * copies * parameters + activations + _bytes(kept) + first_model + generated[0]
    config, sizes = setup.config, stream.task_sizes
    kind = f"of {sizes[0] if len(set(sizes)) == 1 else ', '.join(map(str, sizes))} classes"
    if stream.domains:
        kind = f"in new domains ({', '.join(stream.domains)})"
    samples = " / ".join(f"{sum(len(getattr(task, part)) for task in stream):,}" for part in ("train", "val", "test"))
    title = (
        f"{config.method.name} on {config.data.name}: {len(tasks)} tasks {kind}, {samples} "
        f"{stream.facts.modality.word}, {config.model.name} with {parameters:,} parameters, epochs per task "
        f"{[setup.epochs(task.index) for task in tasks]}, seed {config.seed}"
    )
    return Estimate(
        title,
        tuple((len(t.classes), len(t.train), len(t.val), len(t.test), n) for t, n in zip(tasks, steps, strict=True)),
        parameters,
        memory,
        training + images * statistics.mean(seconds) / len(batch) + (len(tasks) - 1) * generated[1],
        method.head.name,
        _bytes(kept),
        stream.facts.modality,
        generated,
    )


def _time_step(setup: Setup, task: Task) -> tuple[float, int]:
    """Seconds and bytes of activations of a training step, from steps on fewer images where a whole one is long."""
    method = setup.method
    batch = _few(setup, task)
    method.module.train()
    method.begin_task(task, [batch])
    method.begin_epoch(0, 1)
    optimizer = build_optimizer(method.param_groups(decay_groups(method.module, 0.0)))
    owned = {p.untyped_storage().data_ptr() for p in method.module.parameters()}
    counted: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        """Add up the storages that autograd keeps, but those of parameters."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            counted[storage.data_ptr()] = storage.nbytes()
        return tensor

    def step(batch: Batch) -> None:
        train_step(lambda: method.loss(batch), optimizer, after_update=method.after_step)

    beside = 0  # what self-replay adds to a step, whatever the batch size
    if task.index > 0:
        beside = sum(c.config.replay_batch for c in method.regularizers if isinstance(c, SelfReplay))
    whole = setup.config.train.batch_size + beside
    with saved_tensors_hooks(count, lambda x: x):
        step(batch)
    [seconds] = measure(lambda: step(batch), 1, warmup=0)
    timed = _few(setup, task, max(_IMAGES, int(len(batch) * _PATIENCE / seconds) // 2 * 2))
    took = statistics.mean(measure(lambda: step(timed), 2)) / (len(timed) + beside)
    return whole * took, int(whole * sum(counted.values()) / (len(batch) + beside))


def _few(setup: Setup, task: Task, count: int = _IMAGES) -> Batch:
    """Some images of a task as a training batch, at most a whole one."""
    batch = next(iter(setup.train_loader(task, 0)))
    parts = (batch.x, batch.y, batch.soft, batch.raw, batch.index, batch.mask)
    return Batch(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, list) else ()
    return sum(map(_bytes, parts))
