"""What a model has to know of its data: enough to use it again where the data are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infssm.errors import DataError


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
class StreamFacts:
    """A stream of tasks, without its data.

    Attributes:
        images: what the images are like.
        classes: class names in stream order: the position is the label.
        task_sizes: number of classes of each task.
    """

    images: ImageFacts
    classes: tuple[str, ...]
    task_sizes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"images": asdict(self.images), "classes": list(self.classes), "task_sizes": list(self.task_sizes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamFacts:
        """Rebuild what :meth:`to_json` wrote."""
        try:
            facts = cls(
                ImageFacts(**data["images"]), tuple(map(str, data["classes"])), tuple(map(int, data["task_sizes"]))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"these are not the stored facts of a stream: {error!r}") from error
        if sum(facts.task_sizes) != len(facts.classes):
            raise DataError(f"{len(facts.classes)} classes do not make tasks of {list(facts.task_sizes)}")
        return facts
