"""What a model has to know of its data: enough to use it again, or in a file without infssm, where the data are not."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm._modality import Modality, modality_of
from infssm.data.audio import log_of, mel_bank, step_of
from infssm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from infssm.data.dataset import Dataset
    from infssm.data.images import ImageFacts
    from infssm.data.recipes import Recipe, Stats


@dataclass(frozen=True)
class ExportedInput:
    """What an exported model takes.

    Attributes:
        name: of the input in the file.
        example: two samples, ``[2, ...]``, to trace the model with.
        reading: Python lines that read a sample into a variable of that name.
        imports: what these lines import, after ``import json, numpy, onnxruntime``.
        about: what the input is, for the metadata of the file.
        before: from ``example`` to model input; None where they are the same.
        resize: a graph in ONNX's text form from raw images to ``example``; None where the file takes sequences
            ``[n, time, ...]`` of any length.
        raw: batches of raw images that the file is compared with the model on.
    """

    name: str
    example: Tensor
    reading: str
    imports: str = ""
    about: Mapping[str, Any] | None = None
    before: nn.Module | None = None
    resize: str | None = None
    raw: tuple[Tensor, ...] = ()


class Normalize(nn.Module):
    """Pixels uint8 [n, channels, size, size] to model input float32 [n, channels, size, size]."""

    def __init__(self, stats: Stats) -> None:
        super().__init__()
        self.stats = stats

    def forward(self, pixels: Tensor) -> Tensor:
        """See the class."""
        return self.stats.normalize(pixels)


class LogEnergies(nn.Module):
    """Sounds float32 [n, samples] to log energies in frequency bands, float32 [n, steps, bands].

    The Fourier transform of each window is a convolution with cosines and sines, which every runtime has.
    """

    waves: Tensor
    bank: Tensor

    def __init__(self, bands: int, rate: int) -> None:
        super().__init__()
        bank = mel_bank(bands, rate)
        self.window, self.step = 2 * (bank.shape[1] - 1), step_of(rate)
        spectrum = torch.fft.rfft(torch.eye(self.window, dtype=torch.float64)).T  # [frequencies, window]
        waves = torch.cat([spectrum.real, spectrum.imag]) * torch.hann_window(self.window, dtype=torch.float64)
        self.register_buffer("waves", waves.float()[:, None])
        self.register_buffer("bank", bank.T)

    def forward(self, sound: Tensor) -> Tensor:
        """See the class."""
        parts = F.conv1d(F.pad(sound[:, None], (0, self.window - 1)), self.waves, stride=self.step)
        real, imag = parts.chunk(2, dim=1)
        energy = (real.square() + imag.square()) / self.window
        return log_of(energy.transpose(1, 2) @ self.bank)


class Waveform(nn.Module):
    """Sounds float32 [n, samples] to series of one number per step, [n, samples, 1]."""

    def forward(self, sound: Tensor) -> Tensor:
        """See the class."""
        return sound.unsqueeze(-1)


def resizing_graph(facts: ImageFacts, recipe: Recipe) -> str:
    """A graph in ONNX's text form from an image of any size to the pixels that :class:`Normalize` reads.

    uint8 [n, height, width, 3], or [n, height, width] for models of grey images, to uint8 [n, channels, size, size].
    onnxruntime's antialiased cubic ``Resize`` of uint8 is Pillow's bicubic filter, bit for bit.
    """
    grey = facts.channels == 1
    given = "n, height, width" if grey else "n, height, width, 3"
    planes = "Unsqueeze (image, axis_1)" if grey else "Transpose <perm = [0, 3, 1, 2]> (image)"
    by_image = recipe.by_image  # torchvision rounds sides and margins in another way than `to_raw`
    sides, start = ("Floor (exact)", "Round (half_margin)") if by_image else ("Round (exact)", "Floor (half_margin)")
    output, branch = "pixels", ""
    if not by_image and facts.height is not None and (facts.height, facts.width) != (recipe.size, recipe.size):
        # Images that have the size of the training data are resized as a batch of them is, by a bilinear filter.
        output = "resized_any"
        branch = """
  own_size = Equal (shape, trained_size)
  own_size_int = Cast <to = 7> (own_size)
  own_both = ReduceMin <keepdims = 0> (own_size_int)
  is_own = Cast <to = 9> (own_both)
  pixels = If (is_own) <
    then_branch = own () => (uint8[n, c, s, s] own_pixels) {
      own_float = Cast <to = 1> (planes)
      own_sizes = Concat <axis = 0> (lead, size_2)
      own_resized = Resize <mode = "linear", antialias = 1, exclude_outside = 1> (own_float, , , own_sizes)
      own_round = Round (own_resized)
      own_pixels = Cast <to = 2> (own_round)
    },
    else_branch = other () => (uint8[n, c, s, s] other_pixels) { other_pixels = Identity (resized_any) }
  >"""
    return f"""
<ir_version: 10, opset_import: ["" : 20]>
resize (uint8[{given}] image) => (uint8[n, {facts.channels}, {recipe.size}, {recipe.size}] pixels)
<int64[1] axis_1 = {{1}}, int64[2] axes_2_3 = {{2, 3}}, int64[1] raw_size = {{{recipe.raw_size}}},
 int64[2] size_2 = {{{recipe.size}, {recipe.size}}}, double half = {{0.5}},
 int64[2] trained_size = {{{facts.height or 0}, {facts.width or 0}}}>
{{
  planes = {planes}
  lead = Shape <end = 2> (planes)
  shape = Shape <start = 2> (planes)
  shape_double = Cast <to = 11> (shape)
  short_double = ReduceMin <keepdims = 1> (shape_double)
  raw_double = Cast <to = 11> (raw_size)
  scaled = Mul (shape_double, raw_double)
  exact = Div (scaled, short_double)
  sides_double = {sides}
  sides_int = Cast <to = 7> (sides_double)
  sides = Max (sides_int, raw_size)
  resized_sizes = Concat <axis = 0> (lead, sides)
  resized = Resize <mode = "cubic", cubic_coeff_a = -0.5, antialias = 1, exclude_outside = 1>
    (planes, , , resized_sizes)
  margin = Sub (sides, size_2)
  margin_double = Cast <to = 11> (margin)
  half_margin = Mul (margin_double, half)
  start_double = {start}
  start = Cast <to = 7> (start_double)
  stop = Add (start, size_2)
  {output} = Slice (resized, start, stop, axes_2_3){branch}
}}"""


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
        """Facts about the images, if the samples are images."""
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
