"""A data set as a sequence of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from infssm.data.dataset import Dataset, Indices
from infssm.data.division import divide_classes
from infssm.data.facts import StreamFacts
from infssm.data.split import Split
from infssm.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class TaskData:
    """One part of one task.

    Attributes:
        dataset: where the images are.
        indices: int64 [n] data set indices.
        labels: int64 [n] stream labels of those images.
    """

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
        num_tasks: tasks in the stream.
        num_classes: classes in the stream.
        train: training images.
        val: validation images.
        test: test images.
    """

    index: int
    classes: range
    num_tasks: int
    num_classes: int
    train: TaskData
    val: TaskData
    test: TaskData


class TaskStream:
    """Tasks in order: new classes in each, or new domains in each.

    With new classes, stream labels count through the tasks, so that every task has a contiguous range of labels. With
    new domains, labels are those of the data set and every task has all classes; of language, the classes are the
    tokens of the vocabulary.

    Args:
        dataset: the data.
        split: its train, validation and test indices.
        num_tasks: number of tasks, which share the classes as equally as can be.
        class_order_seed: None keeps the natural order of classes; a number permutes them (NumPy's seeded permutation).
        base_classes: classes of task 0; the other tasks share the rest.
        tasks: labels or names of each task's classes, instead of the three above; classes not named are left out.
        by: ``class``, or ``domain``, in which case all of the above speak of domains in the place of classes.
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
            raise ConfigError(f"{dataset.name} is text without classes: make tasks by domain")
        names, group_of = (dataset.classes, dataset.labels) if by == "class" else _domains(dataset)
        division = divide_classes(
            names, num_tasks, base_classes=base_classes, class_order_seed=class_order_seed, tasks=tasks
        )
        self.num_tasks = len(division)
        order: Indices = np.array([group for task in division for group in task], dtype=np.int64)
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
        """What is questionable about the tasks, in one line; None where nothing is."""
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
        """What a model has to know of the stream."""
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

    def _task(self, index: int, group: range) -> Task:
        parts = {name: self._part(name, group) for name in ("train", "val", "test")}
        for name in ("train", "test"):
            if not len(parts[name]):
                raise DataError(f"task {index} of {self.dataset.name} has no {name} images")
        classes = group if self.by == "class" else range(self.num_classes)
        return Task(index, classes, self.num_tasks, self.num_classes, **parts)

    def _part(self, name: str, group: range) -> TaskData:
        indices: Indices = getattr(self.split, name)
        places = self._places[indices]
        mine = indices[(places >= group.start) & (places < group.stop)]
        return TaskData(self.dataset, mine, torch.from_numpy(self._labels[mine]))


def _domains(dataset: Dataset) -> tuple[tuple[str, ...], Indices]:
    if dataset.domain_of is None:
        raise ConfigError(f"{dataset.name} has no domains to make tasks of: use tasks by class")
    return dataset.domains, dataset.domain_of
