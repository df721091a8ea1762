"""A data set as a sequence of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from infssm._registry import suggest
from infssm._seeding import generator
from infssm.data.dataset import Dataset, Indices
from infssm.data.facts import StreamFacts
from infssm.data.sequences import MeasuredSeries
from infssm.data.split import Split
from infssm.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class TaskData:
    """One part of one task: indices int64 [n], and stream labels int64 [n] or targets of regression float32 [n]."""

    dataset: Dataset
    indices: Indices
    labels: Tensor

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream.

    Attributes:
        index: 0-based position in the stream.
        classes: its stream labels, contiguous.
        class_names: names of the labels up to the task's last.
        past: number of classes known before the task; None if it is ``classes.start``.
        domain: name of the task's domains, where tasks are domains.
    """

    index: int
    classes: range
    num_tasks: int
    num_classes: int
    train: TaskData
    val: TaskData
    test: TaskData
    class_names: tuple[str, ...] = ()
    past: int | None = None
    domain: str = ""


class TaskStream:
    """Tasks in order: new classes in each, or new domains in each.

    With new classes, stream labels count through the tasks, so that every task has a contiguous range of labels. With
    new domains, labels are those of the data set and every task has all classes; of language, the classes are the
    tokens of the vocabulary.

    Args:
        dataset: the data.
        split: its train, validation and test indices.
        num_tasks: see :func:`divide_classes`, as for the next three.
        class_order_seed: seed of a permutation of the classes.
        base_classes: classes of task 0.
        tasks: labels or names of each task's classes.
        by: ``class``, or ``domain``, in which case the arguments above count domains instead of classes.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        num_tasks: int = 1,
        *,
        class_order_seed: int | None = None,
        base_classes: int | None = None,
        tasks: Sequence[Sequence[int | str]] | None = None,
        by: Literal["class", "domain"] = "class",
    ) -> None:
        split.verify(dataset)
        self.dataset = dataset
        self.split = split
        self.by = by
        if dataset.modality.by == "domain" and by == "class":
            raise ConfigError(f"{dataset.name} has no classes: make tasks by domain")
        names, group_of = dataset.classes, dataset.labels
        if by == "domain":
            if dataset.domain_of is None:
                raise ConfigError(f"{dataset.name} has no domains to make tasks of: use tasks by class")
            names, group_of = dataset.domains, dataset.domain_of
        division = divide_classes(
            names, num_tasks, base_classes=base_classes, class_order_seed=class_order_seed, tasks=tasks
        )
        self.num_tasks = len(division)
        order: Indices = np.array([group for task in division for group in task], dtype=np.int64)
        self._order = order
        """Labels of the classes, or numbers of the domains, in stream order."""
        place_of = np.full(len(names), -1, dtype=np.int64)
        place_of[order] = np.arange(len(order))
        self._places = place_of[group_of]
        """Place of every sample's class, or domain, in the stream; -1 where it is left out."""
        self._labels = self._places if by == "class" else dataset.labels
        self.class_order: Indices = order if by == "class" else np.arange(dataset.num_classes)
        self.domains = tuple("+".join(names[g] for g in task) for task in division) if by == "domain" else ()
        """Names of each task's domains, where tasks are domains."""
        self.num_classes = dataset.modality.num_outputs(len(self.class_order), dataset.facts.size)
        ends = np.cumsum([len(task) for task in division]).tolist()
        self._groups = [range(a, b) for a, b in pairwise([0, *ends])]
        """Places of each task."""
        self._tasks = [self._task(t, group) for t, group in enumerate(self._groups)]

    @property
    def task_sizes(self) -> tuple[int, ...]:
        """Number of classes of each task."""
        return tuple(len(task.classes) for task in self._tasks)

    @property
    def warning(self) -> str | None:
        """A one-line warning about questionable tasks; None if there are none."""
        single = self.task_sizes.count(1) if self.by == "class" and self.num_classes > 1 else 0
        if not single:
            return None
        domains = f", or make tasks of the {len(self.dataset.domains)} domains with data.by=domain"
        return (
            f"{single} of {self.num_tasks} tasks have a single class, so there is nothing to tell apart while such a "
            f"task is learned: lower data.num_tasks{domains if self.dataset.domains else ''}"
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names in stream order: the position is the stream label."""
        return tuple(self.dataset.classes[c] for c in self.class_order)

    @property
    def facts(self) -> StreamFacts:
        """Facts about the stream that a model needs."""
        return StreamFacts(self.dataset.facts, self.class_names, self.task_sizes, self.domains)

    def __len__(self) -> int:
        return self.num_tasks

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def cumulative(self, index: int) -> Task:
        """Task ``index`` with the images of all tasks up to it: what joint training sees."""
        return self._task(index, range(self._groups[index].stop))

    def merged(self) -> TaskStream:
        """All tasks as one, for a stream without task boundaries; its samples stay in the order of the split."""
        return TaskStream(self.dataset, self.split, tasks=[self._order.tolist()], by=self.by)

    def _task(self, index: int, group: range) -> Task:
        parts = {}
        for name, indices in (("train", self.split.train), ("val", self.split.val), ("test", self.split.test)):
            places = self._places[indices]
            mine = indices[(places >= group.start) & (places < group.stop)]
            if not len(mine) and name != "val":
                raise DataError(f"task {index} of {self.dataset.name} has no {name} samples")
            samples = self.dataset.samples
            targets = samples.targets if isinstance(samples, MeasuredSeries) else self._labels
            parts[name] = TaskData(self.dataset, mine, torch.from_numpy(targets[mine]))
        classes = group if self.by == "class" else range(self.num_classes)
        return Task(
            index,
            classes,
            self.num_tasks,
            self.num_classes,
            parts["train"],
            parts["val"],
            parts["test"],
            class_names=self.class_names[: classes.stop],
            domain=self.domains[index] if self.domains else "",
        )


def in_stream_order(stream: TaskStream, blur: float, seed: int) -> Split:
    """The split of a stream with its training samples in the order of the tasks, shuffled inside each.

    A share ``blur`` of them is at a random place instead, so that tasks have no sharp boundaries.
    """
    rng = generator(seed, "online")
    parts = [task.train.indices for task in stream]
    place = torch.cat([task + torch.rand(len(part), generator=rng) for task, part in enumerate(parts)])
    moved = torch.rand(len(place), generator=rng) < blur
    place = torch.where(moved, len(parts) * torch.rand(len(place), generator=rng), place)
    return replace(stream.split, train=np.concatenate(parts)[place.argsort(stable=True).numpy()])


def divide_classes(
    classes: Sequence[str],
    num_tasks: int,
    *,
    base_classes: int | None = None,
    class_order_seed: int | None = None,
    tasks: Sequence[Sequence[int | str]] | None = None,
) -> list[list[int]]:
    """The labels of each task, in stream order.

    Classes are shared as equally as possible: where they do not divide evenly, the first tasks have one more.

    Args:
        classes: class names; the position is the label.
        num_tasks: number of tasks; ignored where ``tasks`` are given.
        base_classes: classes of task 0; the other tasks share the rest.
        class_order_seed: None keeps the natural order of classes; a number permutes them (NumPy's seeded permutation).
        tasks: labels or names of each task's classes, instead of all of the above; classes not named are left out.
    """
    if tasks is not None:
        if base_classes is not None or class_order_seed is not None:
            raise ConfigError("data.tasks names the classes of every task: leave out base_classes and class_order_seed")
        number = {name: label for label, name in enumerate(classes)}
        labels = [[_label(classes, number, wanted) for wanted in task] for task in tasks]
        counts = Counter(label for task in labels for label in task)
        if not labels or not all(labels):
            raise ConfigError("data.tasks: every task needs at least one class")
        if twice := [classes[label] for label in sorted(counts) if counts[label] > 1]:
            raise ConfigError(f"data.tasks: {', '.join(twice)} named twice; a class belongs to one task")
        return labels
    count = len(classes)
    if not 1 <= num_tasks <= count:
        raise ConfigError(f"{count} classes cannot make {num_tasks} tasks: choose data.num_tasks from 1 to {count}")
    first = [] if base_classes is None else [base_classes]
    rest, sharing = count - sum(first), num_tasks - len(first)
    if first and not (1 <= first[0] <= count and sharing <= rest and (rest == 0) == (sharing == 0)):
        raise ConfigError(
            f"{base_classes} of {count} classes in task 0 leave {rest} for {sharing} other tasks: change "
            "data.base_classes or data.num_tasks, which counts task 0 too"
        )
    sizes = first + [rest // sharing + (task < rest % sharing) for task in range(sharing)]
    order = np.arange(count)
    if class_order_seed is not None:
        if not 0 <= class_order_seed < 2**32:
            raise ConfigError(f"a class order's seed must be from 0 to 2**32 - 1, got {class_order_seed}")
        # The legacy generator, because its permutation for a seed never changes and is the one in common use.
        order = np.random.RandomState(class_order_seed).permutation(count)
    ends = np.cumsum(sizes).tolist()
    return [order[end - size : end].tolist() for size, end in zip(sizes, ends, strict=True)]


def _label(classes: Sequence[str], number: Mapping[str, int], wanted: int | str) -> int:
    """The label that a number or a name in ``data.tasks`` means."""
    if isinstance(wanted, str):
        if wanted not in number:
            raise ConfigError(f"data.tasks: there is no class {wanted!r}{suggest(wanted, classes)}")
        return number[wanted]
    if not 0 <= wanted < len(classes):
        raise ConfigError(f"data.tasks: there is no class {wanted}; labels run from 0 to {len(classes) - 1}")
    if str(wanted) in number and classes[wanted] != str(wanted):
        raise ConfigError(
            f"data.tasks: {wanted} may be the class of that name or the label {wanted}, which is {classes[wanted]!r}: "
            "give names in quotes"
        )
    return wanted
