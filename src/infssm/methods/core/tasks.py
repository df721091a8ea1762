"""What methods are given: tasks, and the batches of their data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from infssm._batch import inputs_of
from infssm.errors import ConfigError
from infssm.methods.core.rows import Input


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


def model_input(batch: BatchLike) -> Input:
    """What the model is called with for a batch: ``x``, with its ``mask`` where steps of sequences are padded."""
    return inputs_of(batch.x, getattr(batch, "mask", None))


Loader = Iterable[BatchLike]


@dataclass(frozen=True)
class TaskInfo:
    """One task of a stream: its 0-based index and the contiguous block of classes it owns."""

    index: int
    classes: range | None = None

    @classmethod
    def of(cls, task: Any) -> TaskInfo:
        """Read a task given as an int or as any object with ``index`` and ``classes``."""
        if isinstance(task, TaskInfo):
            return task
        if isinstance(task, int):
            return cls(task)
        index, classes = getattr(task, "index", None), getattr(task, "classes", None)
        if not isinstance(index, int):
            raise ConfigError(f"a task is its 0-based index or an object with .index and .classes, got {task!r}")
        return cls(index, None if classes is None else _contiguous(classes))

    @property
    def block(self) -> slice:
        """Columns of the logits that belong to this task (all of them where classes are unknown)."""
        return slice(None) if self.classes is None else slice(self.classes.start, self.classes.stop)

    @property
    def seen(self) -> slice:
        """Columns of every class met so far."""
        return slice(None) if self.classes is None else slice(0, self.classes.stop)


def _contiguous(classes: Sequence[int]) -> range:
    block = range(classes[0], classes[-1] + 1)
    if list(classes) != list(block):
        raise ConfigError(f"a task's classes must be one ascending block of stream labels, got {list(classes)}")
    return block
