"""What a model has to know of its data: enough to use it again where the data are not."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from torch import Tensor

from infssm._modality import Modality, modality_of
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from infssm.data.dataset import Dataset
    from infssm.data.exported import ExportedInput
    from infssm.data.images import ImageFacts
    from infssm.data.recipes import Recipe

SampleLike: TypeAlias = "str | os.PathLike[str] | Image | np.ndarray[Any, Any] | Tensor"
"""A file, a PIL image, uint8 pixels ``[height, width]`` or ``[height, width, 3]``, or a series ``[time, width]``."""
_CLASSES: dict[str, type[SampleFacts]] = {}


class SampleFacts(ABC):
    """What the samples of a data set are like, without the samples; it reads new samples in the same way.

    A subclass for another kind of samples says which: ``class Strokes(SequenceFacts, kind="strokes")``. Data sets of
    this kind, and folders of what was trained on them, then have it.

    Attributes:
        name: name the data set was loaded by.
        kind: what a sample is made of, one of the modality's ``kinds``.
        stored_as: key in files: ``images`` or ``sequences``.
        suffixes: endings of the files that hold samples.
    """

    name: str
    kind: str
    stored_as: ClassVar[str]
    suffixes: ClassVar[frozenset[str]]

    def __init_subclass__(cls, kind: str | None = None) -> None:
        if kind is not None:
            _CLASSES[kind] = cls

    @property
    @abstractmethod
    def size(self) -> int:
        """What a model must know of one sample's size."""

    @abstractmethod
    def read(self, sample: SampleLike, recipe: Recipe | None = None) -> Tensor:
        """A file, array or image as one sample of model input, by the same steps as in evaluation.

        DataError where it is something else, or holds values that are not finite: the model would answer all the same.
        """

    @abstractmethod
    def raw(self, sample: SampleLike) -> Tensor:
        """The same as an exported file takes it, see :meth:`exported`."""

    def samples_in(self, file: Path) -> Mapping[str, Any]:
        """Samples of a file by name; each can be given to :meth:`read`."""
        return {str(file): file}

    @abstractmethod
    def fit(self, dataset: Dataset, recipe: Recipe | None) -> Dataset:
        """A data set as samples that are like these: colours, sizes and sampling rates are converted.

        DataError where that cannot be: another kind of data, series of another width, another vocabulary.
        """

    @abstractmethod
    def exported(self, recipe: Recipe | None) -> ExportedInput:
        """The input of a model that is exported to a file."""


def facts_class(kind: str) -> type[Any]:
    """The class of facts for samples of a ``kind``; that of series unless there is another one."""
    return _CLASSES.get(kind, _CLASSES["series"])


@dataclass(frozen=True)
class StreamFacts:
    """A stream of tasks, without its data.

    Attributes:
        samples: what the images or sequences are like.
        classes: class names in stream order: the position is the label. Language has one class.
        task_sizes: number of classes of each task.
        domains: names of each task's domains, joined, where tasks are domains; else none.
    """

    samples: SampleFacts
    classes: tuple[str, ...]
    task_sizes: tuple[int, ...]
    domains: tuple[str, ...] = ()

    @property
    def images(self) -> ImageFacts:
        """What the images are like, where the samples are images."""
        if self.samples.stored_as != "images":
            raise ConfigError(f"{self.samples.name} holds {self.samples.kind}, not images")
        return self.samples  # type: ignore[return-value]

    @cached_property
    def modality(self) -> Modality:
        """What kind of data the samples are."""
        return modality_of(self.samples.kind, len(self.classes))

    @property
    def num_outputs(self) -> int:
        """Logits of a model: one for each class, or for each token of the vocabulary."""
        return self.modality.num_outputs(len(self.classes), self.samples.size)

    def seen(self, task: int) -> int:
        """Classes met up to a task."""
        return len(self.classes) if self.domains else sum(self.task_sizes[: task + 1])

    def up_to(self, task: int) -> StreamFacts:
        """The stream as it is known once ``task`` has arrived: its tasks up to this one, and their classes."""
        domains, sizes = self.domains[: task + 1], self.task_sizes[: task + 1]
        return replace(self, classes=self.classes[: self.seen(task)], task_sizes=sizes, domains=domains)

    def without(self, label: int) -> StreamFacts:
        """Without a class, and without its task where that brought no other class."""
        task = int(np.searchsorted(np.cumsum(self.task_sizes), label, side="right"))
        size, sizes = self.task_sizes[task] - 1, self.task_sizes
        sizes = (*sizes[:task], *((size,) if size else ()), *sizes[task + 1 :])
        return replace(self, classes=self.classes[:label] + self.classes[label + 1 :], task_sizes=sizes)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        domains = {"domains": list(self.domains)} if self.domains else {}
        return {
            self.samples.stored_as: asdict(self.samples),  # type: ignore[call-overload]
            "classes": list(self.classes),
            "task_sizes": list(self.task_sizes),
        } | domains

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamFacts:
        """Rebuild what :meth:`to_json` wrote."""
        try:
            key = next(key for key in ("images", "sequences") if key in data)
            facts = cls(
                facts_class(data[key].get("kind", "images"))(**data[key]),
                tuple(map(str, data["classes"])),
                tuple(map(int, data["task_sizes"])),
                tuple(map(str, data.get("domains", ()))),
            )
        except (KeyError, StopIteration, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"these are not the stored facts of a stream: {error!r}") from error
        if facts.domains and len(facts.domains) != len(facts.task_sizes):
            raise DataError(f"{len(facts.domains)} domains do not make {len(facts.task_sizes)} tasks")
        if not facts.domains and sum(facts.task_sizes) != len(facts.classes):
            raise DataError(f"{len(facts.classes)} classes do not make tasks of {list(facts.task_sizes)}")
        return facts
