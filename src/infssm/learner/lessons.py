"""One lesson: samples in any form become one more task, on which model and method are trained and then examined."""

from __future__ import annotations

import os
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infssm._batch import model_input, run_model
from infssm._machine import num_threads
from infssm._modality import pad
from infssm._seeding import seed_all
from infssm.data import (
    ArrayImages,
    Dataset,
    FileImages,
    ImageFacts,
    SampleFacts,
    Sequences,
    SoundFiles,
    Task,
    audio,
    load_dataset,
    require_readable,
)
from infssm.data.facts import StreamFacts
from infssm.data.images import to_raw
from infssm.data.loader import Part
from infssm.data.sequences import ArraySequences
from infssm.data.stream import TaskData, TaskStream
from infssm.errors import ConfigError, DataError
from infssm.learner.calibration import HeldOut, held_out_rows, held_out_scores, kept_rows
from infssm.learner.config.fields import DataConfig, RunConfig
from infssm.learner.config.resolve import check_growing, task0_config
from infssm.learner.devices import launch
from infssm.learner.events import Control, Listener, RunBegan, RunEnded
from infssm.learner.knowledge import Knowledge
from infssm.learner.loop import Loop, weights_of
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.saving import Position, Progress
from infssm.learner.scoring import Bits
from infssm.learner.setup import Setup, build
from infssm.learner.store.directory import RunDirectory
from infssm.methods import parse_name
from infssm.ssm import logits_of


class TaughtTask(TaskStream):
    """A stream that holds only its last task; the data of earlier lessons are gone.

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
    """Data in any form as a data set: a name or path, samples with labels, a data set or a loader of torch.

    Args:
        data: a path or name as for ``infssm run data=``; or samples, if there are ``labels``: arrays uint8 ``[n,
            height, width]`` or ``[n, height, width, 3]``, series ``[n, time, width]``, or a list of files, PIL images
            or arrays, or :class:`~infssm.data.Sequences`; or a map-style data set or a loader of torch that yields
            ``(x, label)``.
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
    if isinstance(data, Sequences):
        return data
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
        padded, mask = pad([torch.tensor(item) for item in series])
        return ArraySequences(padded.numpy(), mask.sum(1).numpy())
    opened = [ImageFacts("samples", 3).open(item) for item in data]
    size = min(min(image.size) for image in opened)
    same = all(image.size == opened[0].size for image in opened)
    pixels = [torch.from_numpy(np.array(i)).permute(2, 0, 1) if same else to_raw(i, size) for i in opened]
    return ArrayImages(torch.stack(pixels).contiguous())


def as_task(dataset: Dataset, facts: StreamFacts | None, name: str, *, samples: SampleFacts) -> TaughtTask:
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


def check_method(config: RunConfig, taught: TaughtTask) -> None:
    """Raise for a method that cannot learn what is taught."""
    base, *others = parse_name(config.method.name).classes
    if getattr(base, "joint", False):
        raise ConfigError(
            f"{base.name} cannot be taught at any time, since it trains on the data of all tasks, and earlier "
            "lessons are no longer available: choose another method, or use it with `infssm run`"
        )
    more = taught.task.past and taught.task.classes.start == 0
    check_growing(config.method.name)
    for component in (base, *others):
        if more and not component.supports_domains:
            raise ConfigError(f"{component.name} cannot learn more samples of known classes: teach only new classes")


def teach(
    now: Knowledge, config: RunConfig, taught: TaughtTask, device: str, listen: Listener, control: Control
) -> tuple[Knowledge, Setup]:
    """What is known after a task; ``now``, what was known before it, does not change."""
    check_method(config, taught)
    task, before, place = taught.task, now.method, torch.device(device)
    # Sums depend on the number of threads in their last digits, so it is that of the settings.
    with num_threads(config.train.threads), tempfile.TemporaryDirectory() as folder:
        task0 = None
        if before is None and config.train.task0 == "plain":
            plain = build(task0_config(config), place, stream=taught, task=task.index, own=now.own)
            launch(plain.config.train, _train, plain, task, listen, control)
            task0 = Path(folder) / "task0.safetensors"
            task0.write_bytes(weights_of(plain.method.weights()))
        setup = build(config, place, stream=taught, task=task.index, weights=before is None, task0=task0, own=now.own)
        if before is not None:
            setup.method.grow_from(before.state_dict(), before.module.state_dict())
        method, epochs = setup.method, setup.epochs(task.index)
        if epochs:
            launch(config.train, _train, setup, task, listen, control)
        else:
            seed_all(config.seed, task.index, "begin")
            method.module.train()
            method.begin_task(task, setup.statistics_loader(task))
        seed_all(config.seed, task.index, "end")
        images = setup.plain_loader(taught.everything or task)
        method.end_task(task, setup.statistics_loader(task), images)
        method.module.eval()
    trained = now.trained or bool(epochs) or task0 is not None
    return replace(now, config=config, facts=taught.facts, method=method, recipe=setup.recipe, trained=trained), setup


@torch.no_grad()
def examine(now: Knowledge, setup: Setup, taught: TaughtTask, unknown: float) -> tuple[Knowledge, float | None]:
    """Calibrate on the held-out samples of all lessons; how right the model is on those of the classes taught."""
    task, head = taught.task, setup.method.head
    if not now.has_classes:
        part: Part = "test" if len(task.test) else "val"
        return now, bits_of(setup, task, part).value if len(task.test) or len(task.val) else None
    held_out = now.held_out
    if not (setup.method.base.freezes or head.fitted):
        held_out = None  # features of earlier lessons are those of another backbone
    if taught.everything is None or not len(task.val):
        return now.calibrated(held_out, unknown=unknown), None
    if head.fitted and not (setup.epochs(task.index) or (task.index == 0 and now.trained)):
        whole = taught.everything.train  # nothing was trained on them, and a fitted head can do without any of them
        kept = kept_rows(whole.labels)
        task = replace(task, val=TaskData(whole.dataset, whole.indices[kept.numpy()], whole.labels[kept]))
    rows, labels = now.features_of(setup.eval_loader(task, "val"))
    held_out = (held_out or HeldOut.empty(rows.shape[1])).after_task(head, rows, labels)
    logits, _, asked = held_out_scores(head, held_out, labels)
    right = logits.cpu().argmax(1) == held_out.labels[asked]
    return now.calibrated(held_out, unknown=unknown), float(right.double().mean())


def _train(fabric: Any, setup: Setup, task: Task, listen: Listener, control: Control) -> None:
    """Train one task as a run does, without its checkpoints: after a failure the version before is still there."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(folder)
        run.make()
        progress = Progress(Position(task=task.index), AccuracyMatrix(1, setup.quantity))
        loop = Loop(fabric, setup, progress, run, None, listen, control)
        epochs, steps = setup.epochs(task.index), len(setup.train_loader(task, 0))
        listen(RunBegan(f"lesson {task.index + 1}", epochs * min(steps, setup.config.train.limit_batches or steps), 0))
        try:
            loop.begin_task(task)
            loop.train_task(task, epochs)
        finally:
            listen(RunEnded())


def sample_counts(taught: TaughtTask) -> dict[str, int]:
    """Samples of each class that is taught, held-out ones included; of language of the domain."""
    task = taught.task
    labels = {
        index: label
        for part in (task.train, task.val)
        for index, label in zip(part.indices.tolist(), part.labels.tolist(), strict=True)
    }
    if taught.domains:
        return {taught.domains[-1]: len(labels)}
    counts = Counter(labels.values())
    return {taught.facts.classes[label]: counts[label] for label in sorted(counts)}


@torch.no_grad()
def bits_of(setup: Setup, task: Task, part: Part) -> Bits:
    """Bits of a part of a task's text."""
    method, counts = setup.method, []
    for batch in setup.eval_loader(task, part):
        batch = batch.to(method.context.device)
        logits = logits_of(run_model(method.module, model_input(batch)))
        counts.append(Bits.counts(logits, batch, task, part, setup.facts.num_outputs))
    return Bits.of(torch.stack(counts).sum(0).tolist())
