"""A data set as a sequence of tasks with equal class counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infssm.data.dataset import ImageDataset, Indices
from infssm.data.split import Split
from infssm.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class TaskData:
    """One part of one task.

    Attributes:
        dataset: where the pictures are.
        indices: int64 [n] data set indices.
        labels: int64 [n] stream labels of those pictures.
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
    """Tasks in order; task t holds stream labels ``[t * k, (t + 1) * k)``.

    Args:
        dataset: the data.
        split: its train, validation and test indices.
        num_tasks: must divide the number of classes.
        class_order_seed: None keeps the natural order of classes; a number permutes them (NumPy's seeded permutation).
    """

    def __init__(
        self, dataset: ImageDataset, split: Split, num_tasks: int, *, class_order_seed: int | None = None
    ) -> None:
        count = dataset.num_classes
        if num_tasks < 1 or count % num_tasks:
            choices = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigError(
                f"{dataset.name} has {count} classes, which {num_tasks} tasks cannot share equally; "
                f"choose the number of tasks from {choices}"
            )
        split.verify(dataset)
        self.dataset = dataset
        self.split = split
        self.num_tasks = num_tasks
        self.num_classes = count
        self.class_order = _class_order(count, class_order_seed)
        label_of_class = np.empty(count, dtype=np.int64)
        label_of_class[self.class_order] = np.arange(count)
        self._labels = label_of_class[dataset.labels]
        per_task = count // num_tasks
        self._tasks = [self._task(t, range(t * per_task, (t + 1) * per_task)) for t in range(num_tasks)]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names in stream order: the position is the stream label."""
        return tuple(self.dataset.classes[c] for c in self.class_order)

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


def _class_order(count: int, seed: int | None) -> Indices:
    """``order[label]`` is the class that gets this stream label."""
    if seed is None:
        return np.arange(count)
    # The legacy generator, because its permutation for a seed is fixed for ever and is the one in common use.
    return np.random.RandomState(seed).permutation(count).astype(np.int64)
