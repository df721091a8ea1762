"""`Modality`: what differs between kinds of data (images, series, regression, tokens, language).

Runs and learners ask the modality instead of testing which kind of data they have. A new kind of data is a subclass,
registered with :func:`register_modality`, and a class of samples whose ``kind`` it names; ``like`` lets it use the
methods and models of a kind that exists. How a sample is read from a file or an array, and what an exported model
takes, is a matter of the facts of the samples (:class:`infssm.data.SampleFacts`), because methods do not import data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infssm._batch import Batch, next_tokens
from infssm._registry import Registry
from infssm.errors import ConfigError

Augment = Callable[[Tensor], Tensor]
"""From stored samples to model input."""


class Modality(ABC):
    """A kind of data.

    Attributes:
        name: its name; models and methods list the names that they support.
        kinds: values of the samples' ``kind`` that it covers.
        word: what samples are called in output and errors.
        like: name of a modality whose models and methods also work on this one; None for only its own.
        augmented: whether samples become model input through a recipe (resizing, normalisation, augmentation).
        scoring: how a model is measured, a key of ``infssm.learner.scoring.SCORES``: ``classes``, ``tokens`` or
            ``numbers``.
        by: what makes tasks unless the user says so.
        input_option: option of models that takes the samples' size, see :meth:`model_options`.
        field: field of replay buffers that holds the samples, see ``infssm.methods.replay.buffers.FIELDS``.
        settings: model and training settings for a user's own data; None if they depend on the samples.
        hub_task: what the Hugging Face Hub calls a model of such data; None for nothing.
    """

    name: ClassVar[str]
    kinds: ClassVar[frozenset[str]]
    word: ClassVar[str]
    like: ClassVar[str | None] = None
    augmented: ClassVar[bool] = False
    scoring: ClassVar[str] = "classes"
    by: ClassVar[Literal["class", "domain"]] = "class"
    input_option: ClassVar[str]
    field: ClassVar[str]
    settings: ClassVar[Mapping[str, Any] | None] = None
    hub_task: ClassVar[str | None] = None

    def covers(self, kind: str, num_classes: int) -> bool:  # noqa: ARG002 - tokens differ by their classes
        """Whether samples of a kind with so many classes are of this modality."""
        return kind in self.kinds

    def supported_by(self, names: frozenset[str]) -> bool:
        """Whether a model or method that supports the named modalities works on this one."""
        return self.name in names or self.like in names

    def num_outputs(self, num_classes: int, size: int) -> int:  # noqa: ARG002 - language has as many as there are tokens
        """Outputs of a model: one per class unless overridden. ``size`` is that of the samples' facts."""
        return num_classes

    def model_options(self, num_classes: int, size: int) -> dict[str, int]:
        """Options of ``create_model`` that follow from the data."""
        return {self.input_option: size, "num_classes": num_classes}

    @abstractmethod
    def collate(self, samples: Sequence[Tensor], labels: Tensor) -> Batch:
        """One batch of samples, each a tensor without the batch dimension, with their ``labels: [n]``."""

    @property
    @abstractmethod
    def stored_fields(self) -> tuple[str, ...]:
        """Fields of a replay buffer."""

    @abstractmethod
    def rows(self, batch: Any, method: str) -> dict[str, Tensor]:
        """The fields of a batch that a replay buffer stores, each ``[n, ...]``; ``method`` is named in errors."""

    @abstractmethod
    def join(self, batch: Any, stored: Mapping[str, Tensor], augment: Augment) -> Batch:
        """A batch of ``b`` samples with ``m`` replayed ones after it: ``[b + m, ...]``, on the batch's device."""


class _Images(Modality):
    name = "images"
    kinds = frozenset({"images"})
    word = "images"
    augmented = True
    input_option = "in_chans"
    field = "image"
    hub_task = "image-classification"
    stored_fields = ("image", "label")

    def collate(self, samples: Sequence[Tensor], labels: Tensor) -> Batch:
        """Images of one size ``[channels, height, width]``."""
        return Batch(torch.stack(list(samples)), labels)

    def rows(self, batch: Any, method: str) -> dict[str, Tensor]:
        """Images before augmentation: uint8 ``[n, channels, height, width]``."""
        return {"image": raw_images(batch, method), "label": batch.y}

    def join(self, batch: Any, stored: Mapping[str, Tensor], augment: Augment) -> Batch:
        """Replayed images are augmented afresh."""
        x = torch.cat((batch.x, augment(stored["image"])))
        return Batch(x, torch.cat((batch.y, stored["label"].to(x.device))))


class Sequential(Modality):
    """Samples of different lengths: batches are padded with zeros and have a mask."""

    @property
    def stored_fields(self) -> tuple[str, ...]:
        """The sequences, their lengths and labels."""
        return (self.field, "length", "label")

    def rows(self, batch: Any, method: str) -> dict[str, Tensor]:  # noqa: ARG002 - nothing can be missing
        """Padded sequences with their lengths; without labels of their own, zeros take their place."""
        labels = batch.y if batch.y.ndim == 1 else batch.y.new_zeros(len(batch.y))
        return {self.field: batch.x, "length": _lengths(batch), "label": labels}

    def join(self, batch: Any, stored: Mapping[str, Tensor], augment: Augment) -> Batch:  # noqa: ARG002 - as stored
        """All sequences padded to the longest of them."""
        device = batch.x.device
        own = [x[:length] for x, length in zip(batch.x, _lengths(batch).tolist(), strict=True)]
        pairs = zip(stored[self.field], stored["length"].tolist(), strict=True)
        labels = torch.cat((batch.y, stored["label"].to(device))) if batch.y.ndim == 1 else batch.y
        return self.collate([*own, *(x[:length].to(device) for x, length in pairs)], labels)

    def collate(self, samples: Sequence[Tensor], labels: Tensor) -> Batch:
        """A batch of sequences ``[length, ...]`` with ``labels: [n]``, padded to the longest of them."""
        x, mask = pad(samples)
        return Batch(x, self.targets(x, mask, labels), mask=mask)

    def targets(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002 - language predicts x itself
        """Targets of a padded batch ``x: [n, time, ...]`` with ``mask: [n, time]`` and ``labels: [n]``."""
        return labels


class _Series(Sequential):
    name = "series"
    kinds = frozenset({"audio", "series"})
    word = "sequences"
    input_option = "in_dim"
    field = "series"
    settings: ClassVar[Mapping[str, Any] | None] = {
        "model": {"name": "mamba_nano", "options": {"d_model": 64, "n_layer": 3}},
        "train": {"batch_size": 32, "lr": 2e-3},
    }


class _Regression(_Series):
    """Series with a number instead of a class each: the model has one output, and tasks are domains."""

    name = "regression"
    kinds = frozenset({"measured"})
    scoring = "numbers"
    by: ClassVar[Literal["class", "domain"]] = "domain"

    @property
    def stored_fields(self) -> tuple[str, ...]:
        """The series, their lengths and targets; buffers divide by labels, which are all 0."""
        return (*super().stored_fields, "target")

    def rows(self, batch: Any, method: str) -> dict[str, Tensor]:
        """Padded series with their lengths and targets ``[n]``."""
        none = torch.zeros_like(batch.y, dtype=torch.int64)
        return super().rows(batch, method) | {"label": none, "target": batch.y}

    def join(self, batch: Any, stored: Mapping[str, Tensor], augment: Augment) -> Batch:
        """All series padded to the longest of them, targets instead of labels."""
        return super().join(batch, {**stored, "label": stored["target"]}, augment)


class _Tokens(Sequential):
    """Tokens with classes, such as texts by topic."""

    name = "tokens"
    kinds = frozenset({"tokens"})
    word = "sequences"
    input_option = "vocab_size"
    field = "tokens"
    settings = _Series.settings

    def covers(self, kind: str, num_classes: int) -> bool:
        return kind in self.kinds and num_classes > 1


class _Language(Sequential):
    """Tokens without classes: the model predicts the next token, and tasks are domains of text."""

    name = "language"
    hub_task = "text-generation"
    kinds = frozenset({"tokens"})
    word = "sequences"
    scoring = "tokens"
    by: ClassVar[Literal["class", "domain"]] = "domain"
    input_option = "vocab_size"
    field = "tokens"
    settings: ClassVar[Mapping[str, Any] | None] = {
        "model": {"name": "mamba_lm_nano"},
        "train": {"batch_size": 16, "lr": 2e-3, "weight_decay": 0.01},
    }

    def covers(self, kind: str, num_classes: int) -> bool:
        return kind in self.kinds and num_classes == 1

    def num_outputs(self, num_classes: int, size: int) -> int:  # noqa: ARG002 - text has one class
        """One output per token of the vocabulary."""
        return size

    def model_options(self, num_classes: int, size: int) -> dict[str, int]:  # noqa: ARG002 - text has one class
        """The vocabulary is input and output."""
        return {self.input_option: size}

    def targets(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002 - text has no labels
        """The next token of every step: ``[n, time]``."""
        return next_tokens(x, mask)


_MODALITIES: Registry[Modality] = Registry("kind of data")


def register_modality(modality: Modality) -> Modality:
    """Make a modality known, by its name and by the kinds of samples that it covers."""
    return _MODALITIES.register(modality.name)(modality)


IMAGES, SERIES, TOKENS, LANGUAGE, REGRESSION = map(
    register_modality, (_Images(), _Series(), _Tokens(), _Language(), _Regression())
)


def modality_named(name: str) -> Modality:
    """The modality of a name."""
    return _MODALITIES[name]


def modality_of(kind: str, num_classes: int) -> Modality:
    """The modality of samples of a ``kind`` with so many classes."""
    for name in _MODALITIES:
        if _MODALITIES[name].covers(kind, num_classes):
            return _MODALITIES[name]
    raise ConfigError(f"no modality covers samples of kind {kind!r} with {num_classes} classes: register one")


def raw_images(batch: Any, method: str) -> Tensor:
    """The images of a batch before augmentation, uint8 ``[n, channels, height, width]``; ConfigError without them."""
    if batch.raw is None:
        raise ConfigError(
            f"{method} stores images before augmentation: give batches with raw uint8 images, Batch(x, y, raw=images)"
        )
    raw: Tensor = batch.raw
    return raw


def pad(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sequences [length, ...] as one tensor [n, time, ...], zeros after their end, and the mask [n, time] of steps."""
    x = pad_sequence(list(sequences), batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=x.device)
    return x, torch.arange(x.shape[1], device=x.device) < lengths[:, None]


def _lengths(batch: Any) -> Tensor:
    """Steps of every sequence of a padded batch: ``[n]``."""
    mask: Tensor | None = getattr(batch, "mask", None)
    if mask is None:
        return torch.full((len(batch.x),), batch.x.shape[1], device=batch.x.device)
    return mask.sum(dim=1)
