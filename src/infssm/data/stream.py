"""A data set as a sequence of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from infssm.data.dataset import ImageDataset, Indices
from infssm.data.division import divide_classes
from infssm.data.facts import StreamFacts
from infssm.data.split import Split
from infssm.errors import DataError


@dataclass(frozen=True, eq=False)
class TaskData:
    """One part of one task.

    Attributes:
        dataset: where the images are.
        indices: int64 [n] data set indices.
        labels: int64 [n] stream labels of those images.
    """

    dataset: ImageDataset
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
    """Tasks in order; stream labels count through them, so that every task has a contiguous range of labels.

    Args:
        dataset: the data.
        split: its train, validation and test indices.
        num_tasks: number of tasks, which share the classes as equally as can be.
        class_order_seed: None keeps the natural order of classes; a number permutes them (NumPy's seeded permutation).
        base_classes: classes of task 0; the other tasks share the rest.
        tasks: labels or names of each task's classes, instead of the three above; classes not named are left out.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        split: Split,
        num_tasks: int = 1,
        *,
        class_order_seed: int | None = None,
        base_classes: int | None = None,
        tasks: Sequence[Sequence[int | str]] | None = None,
    ) -> None:
        split.verify(dataset)
        division = divide_classes(
            dataset.classes, num_tasks, base_classes=base_classes, class_order_seed=class_order_seed, tasks=tasks
        )
        self.dataset = dataset
        self.split = split
        self.num_tasks = len(division)
        self.class_order: Indices = np.array([label for task in division for label in task], dtype=np.int64)
        self.num_classes = len(self.class_order)
        label_of_class = np.full(dataset.num_classes, -1, dtype=np.int64)
        label_of_class[self.class_order] = np.arange(self.num_classes)
        self._labels = label_of_class[dataset.labels]
        ends = np.cumsum([len(task) for task in division]).tolist()
        self._tasks = [self._task(t, range(a, b)) for t, (a, b) in enumerate(pairwise([0, *ends]))]

    @property
    def task_sizes(self) -> tuple[int, ...]:
        """Number of classes of each task."""
        return tuple(len(task.classes) for task in self._tasks)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names in stream order: the position is the stream label."""
        return tuple(self.dataset.classes[c] for c in self.class_order)

    @property
    def facts(self) -> StreamFacts:
        """What a model has to know of the stream."""
        return StreamFacts(self.dataset.facts, self.class_names, self.task_sizes)

    def __len__(self) -> int:
        return self.num_tasks

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def cumulative(self, index: int) -> Task:
        """Task ``index`` with the images of all tasks up to it: what joint training sees."""
        return self._task(index, range(self._tasks[index].classes.stop))

    def _task(self, index: int, classes: range) -> Task:
        parts = {name: self._part(name, classes) for name in ("train", "val", "test")}
        for name in ("train", "test"):
            if not len(parts[name]):
                raise DataError(f"task {index} of {self.dataset.name} has no {name} images")
        return Task(index, classes, self.num_tasks, self.num_classes, **parts)

    def _part(self, name: str, classes: range) -> TaskData:
        indices: Indices = getattr(self.split, name)
        labels = self._labels[indices]
        inside = (labels >= classes.start) & (labels < classes.stop)
        return TaskData(self.dataset, indices[inside], torch.from_numpy(labels[inside]))
