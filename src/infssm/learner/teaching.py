"""The data of one lesson: samples in any form, as one more task after the earlier ones."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infssm.data import (
    ArrayImages,
    Dataset,
    FileImages,
    ImageFacts,
    Recipe,
    SequenceFacts,
    SoundFiles,
    Task,
    audio,
    in_bands,
    load_dataset,
    require_readable,
)
from infssm.data.facts import StreamFacts
from infssm.data.images import to_raw
from infssm.data.sequences import ArraySequences
from infssm.data.stream import TaskData, TaskStream
from infssm.errors import ConfigError, DataError
from infssm.learner.calibration import held_out_rows
from infssm.learner.config.fields import DataConfig
from infssm.learner.reading import open_image


class TaughtTask(TaskStream):
    """A stream that has only its last task: the data of earlier ones are no longer available.

    Args:
        task: the task. Its validation part is held out from training, and calibrates what was learnt.
        facts: what the learner knows of all its tasks, this one included.
        everything: the task with all samples for training, which heads are fitted to: they can leave samples out
            afterwards. None for a task of a stream, whose head is fitted to its training part alone, as in a run.
    """

    def __init__(self, task: Task, facts: StreamFacts, everything: Task | None = None) -> None:
        self.task, self.everything = task, everything
        self.dataset = task.train.dataset
        self.domains, self.num_classes, self.num_tasks = facts.domains, facts.num_outputs, len(facts.task_sizes)
        self._facts = facts

    @property
    def facts(self) -> StreamFacts:
        """Facts about all tasks of the learner."""
        return self._facts

    def __getitem__(self, index: int) -> Task:
        if index != self.task.index:
            raise ConfigError(f"the data of task {index} are no longer available; only those of {self.task.index} are")
        return self.task


def as_dataset(data: Any, labels: Any = None, settings: DataConfig | None = None) -> Dataset:
    """A data set of what a user has: a name or path, samples with labels, a data set or a loader of torch.

    Args:
        data: a path or name as for ``infssm run data=``; or samples, if there are ``labels``: arrays uint8 ``[n,
            height, width]`` or ``[n, height, width, 3]``, series ``[n, time, width]``, or a list of files, PIL images
            or arrays; or a map-style data set or a loader of torch that yields ``(x, label)``.
        labels: names or numbers, one per sample, or one for all.
        settings: where data sets are, and the options with which text is read.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, (str, os.PathLike)) and labels is None:
        name, root = os.fspath(data), None if settings is None else settings.root
        options = settings.options if settings is not None and name.startswith("text:") else {}
        return require_readable(load_dataset(name, root, **options))
    if isinstance(data, (str, os.PathLike)):
        data = [data]
    if labels is None:
        data, labels = _collected(data)
    names = [labels] * len(data) if isinstance(labels, str) else [str(label) for label in _plain(labels)]
    if len(names) != len(data):
        raise DataError(f"{len(data)} samples and {len(names)} labels: give one label per sample")
    if not names:
        raise DataError("there are no samples to learn from")
    classes = tuple(sorted(set(names)))
    numbers = np.array([classes.index(name) for name in names], dtype=np.int64)
    return require_readable(Dataset("samples", classes, _samples(data), numbers, stratified=True))


def _plain(labels: Any) -> Iterable[Any]:
    return labels.tolist() if isinstance(labels, (np.ndarray, Tensor)) else labels


def _collected(data: Any) -> tuple[list[Any], list[Any]]:
    """Samples and labels of a loader, whose batches are taken apart, or of a map-style data set."""
    if not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        raise DataError(f"cannot learn from {type(data).__name__}: give a folder, samples with labels, or a loader")
    samples, labels = [], []
    batched = isinstance(data, torch.utils.data.DataLoader)
    for pair in data if batched else (data[i] for i in range(len(data))):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise DataError("samples without labels: give learn(data, labels), or a data set that yields (x, label)")
        x, y = pair
        samples += list(x) if batched else [x]
        labels += list(_plain(y)) if batched else [int(y) if isinstance(y, Tensor) else y]
    return samples, labels


def _samples(data: Any) -> Any:
    """Samples as the classes of :mod:`infssm.data` hold them."""
    if isinstance(data, (np.ndarray, Tensor)):
        values = data.cpu().numpy() if isinstance(data, Tensor) else data
        return ArrayImages.from_numpy(values) if values.dtype == np.uint8 else ArraySequences(values)
    first = data[0]
    if all(isinstance(item, (str, os.PathLike)) for item in data):
        paths = [Path(item).absolute() for item in data]
        root = Path(os.path.commonpath([path.parent for path in paths]))
        relative = tuple(path.relative_to(root).as_posix() for path in paths)
        if all(path.suffix.lower() in audio.SUFFIXES for path in paths):
            return SoundFiles(root, relative, audio.sound_rate(paths[0]))
        return FileImages(root, relative)
    if isinstance(first, (np.ndarray, Tensor)) and str(first.dtype).removeprefix("torch.") != "uint8":
        series = [np.asarray(item, dtype=np.float32) for item in data]
        if any(item.ndim != 2 or item.shape[1] != series[0].shape[1] for item in series):
            raise DataError("series must be numbers [time, width], all of one width")
        lengths = np.array([len(item) for item in series])
        padded = np.zeros((len(series), max(lengths), series[0].shape[1]), dtype=np.float32)
        for row, item in zip(padded, series, strict=True):
            row[: len(item)] = item
        return ArraySequences(padded, lengths)
    opened = [open_image(item, ImageFacts("samples", 3)) for item in data]
    size = min(min(image.size) for image in opened)
    same = all(image.size == opened[0].size for image in opened)
    pixels = [torch.from_numpy(np.array(i)).permute(2, 0, 1) if same else to_raw(i, size) for i in opened]
    return ArrayImages(torch.stack(pixels).contiguous())


def fitting(dataset: Dataset, facts: ImageFacts | SequenceFacts, recipe: Recipe | None) -> Dataset:
    """A data set as samples of the kind that a learner knows: colours, sizes, sampling rates are converted.

    Raises DataError if that cannot be: other kinds of data, series of another width, another vocabulary.
    """
    if isinstance(facts, ImageFacts):
        if not isinstance(dataset.samples, (ArrayImages, FileImages)):
            raise DataError(f"the learner knows images, and {dataset.name} holds {dataset.facts.kind}")
        if dataset.facts == replace(facts, name=dataset.name):
            return dataset
        size = facts.height if recipe is None else recipe.raw_size
        assert size is not None  # a recipe is missing only at the first lesson, whose size is that of the weights
        opened = [open_image(dataset.images.pil(index), facts) for index in range(len(dataset))]
        return replace(dataset, samples=ArrayImages(torch.stack([to_raw(image, size) for image in opened])))
    if isinstance(dataset.samples, SoundFiles) and facts.rate is not None:
        dataset = in_bands(replace(dataset, samples=replace(dataset.samples, rate=facts.rate)), facts.bands)
    found = dataset.facts
    if not isinstance(found, SequenceFacts) or replace(found, name=facts.name) != facts:
        width = f" of width {found.width}" if isinstance(found, SequenceFacts) else ""
        raise DataError(
            f"the learner knows {facts.kind} of width {facts.width}, and {dataset.name} holds {found.kind}{width}"
        )
    return dataset


def as_task(
    dataset: Dataset, facts: StreamFacts | None, name: str, *, samples: ImageFacts | SequenceFacts
) -> TaughtTask:
    """A data set as the next task of a learner that knows ``facts``; None if it knows nothing yet.

    ``samples`` is what its images or sequences are like. Of classes some samples of each are the validation part, of
    text the last tenth of it. A task with samples of known classes has all classes. An official test part is not
    taught.
    """
    if dataset.modality.scoring == "numbers":
        raise ConfigError(
            f"{dataset.name} has numbers as targets, and a learner is taught classes or text: `infssm run`"
        )
    before = StreamFacts(samples, (), ()) if facts is None else facts
    known, index = before.classes, len(before.task_sizes)
    whole, labels = np.arange(len(dataset) - dataset.num_test), dataset.labels
    past: int | None = None
    text = dataset.modality.by == "domain"
    if text:
        classes, outputs = dataset.classes, dataset.modality.num_outputs(1, dataset.facts.size)
        held = whole[-max(1, len(whole) // 10) :] if len(whole) > 1 else whole[:0]
        block, sizes = range(outputs), (outputs,) * (index + 1)
    else:
        new = [label for label in dataset.classes if label not in known]
        _check_names(known, dataset.classes)
        classes = (*known, *new)
        labels = np.array([classes.index(label) for label in dataset.classes], dtype=np.int64)[labels]
        counts = np.bincount(labels[whole], minlength=len(classes))
        if few := [label for label in new if counts[classes.index(label)] < 2]:
            number = counts[classes.index(few[0])]
            raise DataError(
                f"{few[0]!r} has {'one' if number else 'no'} sample to learn from: a new class needs at least two, one "
                "of which is held out for testing"
            )
        held = held_out_rows(torch.from_numpy(labels[whole])).numpy()
        fresh = len(new) == len(dataset.classes) and not before.domains
        block, past = range(len(known), len(classes)) if fresh else range(len(classes)), len(known)
        outputs, sizes = len(classes), (*before.task_sizes, len(classes) if before.domains else len(new))
    train, val, test, everything = (
        TaskData(dataset, rows, torch.from_numpy(labels[rows]))
        for rows in (np.delete(whole, held), held, np.arange(len(whole), len(labels)), whole)
    )
    domains = (*before.domains, name) if text or before.domains else ()
    domain = name if domains else ""
    task = Task(index, block, index + 1, outputs, train, val, test, class_names=classes, past=past, domain=domain)
    facts = StreamFacts(samples, classes, sizes, domains)
    return TaughtTask(task, facts, None if text else replace(task, train=everything))


def for_testing(dataset: Dataset, facts: StreamFacts) -> TaughtTask:
    """A data set to test a learner on that knows all its classes: its official test part, else all of it."""
    rows = np.arange(len(dataset) - (dataset.num_test or len(dataset)), len(dataset))
    labels = np.zeros(len(dataset), dtype=np.int64)
    if dataset.modality.by == "class":
        labels = np.array([facts.classes.index(label) for label in dataset.classes])[dataset.labels]
    none, test = (TaskData(dataset, part, torch.from_numpy(labels[part])) for part in (rows[:0], rows))
    index, outputs = len(facts.task_sizes) - 1, facts.num_outputs
    return TaughtTask(Task(index, range(outputs), index + 1, outputs, none, none, test), facts)


def from_stream(task: Task, facts: StreamFacts | None) -> TaughtTask:
    """A task of a :class:`~infssm.data.TaskStream`, as the learner's next one."""
    index = 0 if facts is None else len(facts.task_sizes)
    if task.index != index:
        raise ConfigError(f"the learner has learnt {index} tasks, so task {index} is next, not {task.index}")
    before = StreamFacts(task.train.dataset.facts, (), ()) if facts is None else facts
    domains = (*before.domains, task.domain) if task.domain else ()
    sizes = (*before.task_sizes, len(task.classes))
    return TaughtTask(task, StreamFacts(before.samples, task.class_names, sizes, domains))


def _check_names(known: Sequence[str], taught: Sequence[str]) -> None:
    """Refuse names that nobody could tell apart, or that are paths."""

    def spelt(label: str) -> str:
        return unicodedata.normalize("NFKC", label).casefold()

    spelling = {spelt(label): label for label in known}
    for label in taught:
        if not label.strip() or label != label.strip() or "/" in label or "\\" in label or label in (".", ".."):
            raise DataError(f"{label!r} is not a name for a class: use one without slashes or spaces around it")
        other = spelling.setdefault(spelt(label), label)
        if other != label:
            raise DataError(f"the classes {other!r} and {label!r} differ in case or accents' encoding only: use one")
