"""Facts about the data that a model needs, enough to use it without the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from infssm._modality import Modality, modality_of
from infssm.errors import ConfigError, DataError


@dataclass(frozen=True)
class ImageFacts:
    """The images of a data set, without the images.

    Attributes:
        name: name the data set was loaded by.
        channels: colour channels, 1 or 3.
        height: pixels, where all images have one size; None for files of any size.
        width: like ``height``.
    """

    kind: ClassVar[str] = "images"
    name: str
    channels: int
    height: int | None = None
    width: int | None = None

    @property
    def size(self) -> int:
        """The size of one sample: the channels."""
        return self.channels


@dataclass(frozen=True)
class SequenceFacts:
    """The sequences of a data set, without the sequences.

    Attributes:
        name: name the data set was loaded by.
        kind: what a step is, see :class:`~infssm.data.sequences.Sequences`.
        width: numbers per step; for tokens, how many different ones there are.
        rate: samples per second of audio; None for other kinds.
        bands: frequency bands that take the place of the waveform; None for the waveform itself.
    """

    name: str
    kind: str
    width: int
    rate: int | None = None
    bands: int | None = None

    @property
    def size(self) -> int:
        """The size of one sample: the numbers per step, or the vocabulary."""
        return self.width


_STORED = {"images": ImageFacts, "sequences": SequenceFacts}
"""Keys in files."""


@dataclass(frozen=True)
class StreamFacts:
    """A stream of tasks, without its data.

    Attributes:
        samples: what the images or sequences are like.
        classes: class names in stream order: the position is the label. Language has one class.
        task_sizes: number of classes of each task.
        domains: names of each task's domains, joined, where tasks are domains; else none.
    """

    samples: ImageFacts | SequenceFacts
    classes: tuple[str, ...]
    task_sizes: tuple[int, ...]
    domains: tuple[str, ...] = ()

    @property
    def images(self) -> ImageFacts:
        """Facts about the images, if the samples are images."""
        if isinstance(self.samples, SequenceFacts):
            raise ConfigError(f"{self.samples.name} holds {self.samples.kind}, not images")
        return self.samples

    @cached_property
    def modality(self) -> Modality:
        """The kind of data of the samples."""
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
        sizes, end = list(self.task_sizes), 0
        for task, size in enumerate(sizes):
            end += size
            if label < end:
                sizes[task] -= 1
                if not sizes[task]:
                    del sizes[task]
                break
        return replace(self, classes=self.classes[:label] + self.classes[label + 1 :], task_sizes=tuple(sizes))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        key = next(key for key, facts in _STORED.items() if isinstance(self.samples, facts))
        domains = {"domains": list(self.domains)} if self.domains else {}
        return {
            key: asdict(self.samples),
            "classes": list(self.classes),
            "task_sizes": list(self.task_sizes),
        } | domains

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamFacts:
        """Rebuild what :meth:`to_json` wrote."""
        try:
            key = next(key for key in _STORED if key in data)
            facts = cls(
                _STORED[key](**data[key]),
                tuple(map(str, data["classes"])),
                tuple(map(int, data["task_sizes"])),
                tuple(map(str, data.get("domains", ()))),
            )
        except (KeyError, StopIteration, TypeError, ValueError) as error:
            raise DataError(f"these are not the stored facts of a stream: {error!r}") from error
        if facts.domains and len(facts.domains) != len(facts.task_sizes):
            raise DataError(f"{len(facts.domains)} domains do not make {len(facts.task_sizes)} tasks")
        if not facts.domains and sum(facts.task_sizes) != len(facts.classes):
            raise DataError(f"{len(facts.classes)} classes do not make tasks of {list(facts.task_sizes)}")
        return facts
