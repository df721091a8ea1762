"""The input of methods: tasks, and the batches of their data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from infssm._batch import Batch
from infssm.errors import ConfigError

Input = Tensor | Mapping[str, Any]
"""The input of a model: one tensor ``[b, ...]``, or keyword arguments."""


class BatchLike(Protocol):
    """One training batch. ``x: [b, ...]`` model input, ``y: [b]`` labels in stream order, the rest optional."""

    @property
    def x(self) -> Tensor: ...  # noqa: D102
    @property
    def y(self) -> Tensor: ...  # noqa: D102
    @property
    def soft(self) -> Tensor | None: ...  # noqa: D102
    @property
    def raw(self) -> Tensor | None: ...  # noqa: D102


Loader = Iterable[BatchLike]


class Batches:
    """A user's loader as a loader of batches: plain ``(x, y)`` pairs, as most loaders yield, become a Batch."""

    def __init__(self, loader: Any) -> None:
        self.source = loader
        """The loader as it was passed."""

    def __iter__(self) -> Iterator[BatchLike]:
        for batch in self.source:
            if hasattr(batch, "x"):
                yield batch
            elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
                yield Batch(batch[0], batch[1])
            else:
                raise ConfigError(
                    f"a loader must yield (x, y) pairs or batches with .x and .y, got {type(batch).__name__}"
                )

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class TaskInfo:
    """One task of a stream: its 0-based index and the contiguous block of classes it has samples of.

    ``past`` is the number of classes that were known before the task: those before its block, unless the task has new
    samples of known classes too, in which case its block is that of all classes.
    """

    index: int
    classes: range | None = None
    past: int | None = None

    @classmethod
    def of(cls, task: Any) -> TaskInfo:
        """Read a task given as an int or as any object with ``index`` and ``classes``."""
        if isinstance(task, TaskInfo):
            return task
        if isinstance(task, int):
            return cls(task)
        index: Any = getattr(task, "index", None)
        classes: Sequence[int] | None = getattr(task, "classes", None)
        if not isinstance(index, int):
            raise ConfigError(f"a task is its 0-based index or an object with .index and .classes, got {task!r}")
        if classes is None:
            return cls(index)
        block = range(classes[0], classes[-1] + 1)
        if list(classes) != list(block):
            raise ConfigError(f"a task's classes must be one ascending block of stream labels, got {list(classes)}")
        return cls(index, block, getattr(task, "past", None))

    @cached_property
    def block(self) -> slice:
        """Columns of the logits that belong to this task (all of them where classes are unknown)."""
        return slice(None) if self.classes is None else slice(self.classes.start, self.classes.stop)

    @property
    def past_classes(self) -> slice:
        """Columns of the classes known before the task; all where tasks bring no classes (domains, language)."""
        past = self.past if self.past is not None or self.classes is None else self.classes.start
        return slice(0, past) if past else slice(None)

    @property
    def seen(self) -> slice:
        """Columns of every class met so far."""
        return slice(None) if self.classes is None else slice(0, self.classes.stop)
