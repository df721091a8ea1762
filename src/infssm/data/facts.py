"""What a model has to know of its data: enough to use it again where the data are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from infssm.errors import ConfigError, DataError

Kind = Literal["audio", "series", "tokens"]


@dataclass(frozen=True)
class ImageFacts:
    """The images of a data set, without the images.

    Attributes:
        name: name the data set was loaded by.
        channels: colour channels, 1 or 3.
        height: pixels, where all images have one size; None for files of any size.
        width: as ``height``.
    """

    name: str
    channels: int
    height: int | None = None
    width: int | None = None


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
    kind: Kind
    width: int
    rate: int | None = None
    bands: int | None = None


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
        """What the images are like, where the samples are images."""
        if isinstance(self.samples, SequenceFacts):
            raise ConfigError(f"{self.samples.name} holds {self.samples.kind}, not images")
        return self.samples

    @property
    def kind(self) -> str:
        """Which models it is for: ``images``, ``series``, ``tokens`` (with classes) or ``language``."""
        if isinstance(self.samples, ImageFacts):
            return "images"
        if self.samples.kind != "tokens":
            return "series"
        return "tokens" if len(self.classes) > 1 else "language"

    @property
    def word(self) -> str:
        """What to call the samples."""
        return "images" if self.kind == "images" else "sequences"

    @property
    def num_outputs(self) -> int:
        """Logits of a model: one for each class, or for each token of the vocabulary."""
        if isinstance(self.samples, SequenceFacts) and self.kind == "language":
            return self.samples.width
        return len(self.classes)

    def seen(self, task: int) -> int:
        """Classes met up to a task."""
        return len(self.classes) if self.domains else sum(self.task_sizes[: task + 1])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        key = "images" if isinstance(self.samples, ImageFacts) else "sequences"
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
            sequences = "sequences" in data
            facts = cls(
                SequenceFacts(**data["sequences"]) if sequences else ImageFacts(**data["images"]),
                tuple(map(str, data["classes"])),
                tuple(map(int, data["task_sizes"])),
                tuple(map(str, data.get("domains", ()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"these are not the stored facts of a stream: {error!r}") from error
        if facts.domains and len(facts.domains) != len(facts.task_sizes):
            raise DataError(f"{len(facts.domains)} domains do not make {len(facts.task_sizes)} tasks")
        if not facts.domains and sum(facts.task_sizes) != len(facts.classes):
            raise DataError(f"{len(facts.classes)} classes do not make tasks of {list(facts.task_sizes)}")
        return facts
