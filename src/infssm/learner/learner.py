"""`Learner`: a model that can be taught at any time, by any process that has its folder."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from infssm.data import ImageFacts, SampleFacts, Task, TokenFacts, in_bands
from infssm.data.facts import SampleLike
from infssm.data.sets.text import open_tokenizer
from infssm.errors import ConfigError, DataError
from infssm.learner.calibration import Shift, held_out_scores, shift
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, merge
from infssm.learner.config.resolve import resolve, settings_for, with_packaged
from infssm.learner.evaluate import Evaluation
from infssm.learner.events import Control, Listener
from infssm.learner.knowledge import Knowledge, Lesson
from infssm.learner.lessons import (
    TaughtTask,
    as_dataset,
    as_task,
    bits_of,
    examine,
    for_testing,
    from_stream,
    sample_counts,
    teach,
)
from infssm.learner.metrics import Confusion
from infssm.learner.predict import Prediction, Predictor, Stream, TrainedClassifier, load_classifier
from infssm.learner.setup import OWN, OwnModel, Setup
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.versions import POINTER, Versions
from infssm.methods import parse_name
from infssm.models.features import find_classifier
from infssm.models.generate import generate
from infssm.models.pretrained import PACKAGED_FOR
from infssm.ssm import unwrap

if TYPE_CHECKING:
    from PIL.Image import Image

Text = TypeVar("Text", str, Tensor)
"""Text, or ids of its tokens."""


class Learner(Predictor):
    """A model that can be taught new classes, and more of known ones, at any time.

    ```python
    learner = infssm.Learner("vim_nano", weights="omniglot", folder="my-learner")
    learner.learn("photos/monday")  # one folder per class
    learner.learn(images, labels, name="tuesday")  # new classes, more images of known ones, or both
    learner.predict("cat.jpg")  # Prediction(label, probability, probabilities, known)
    ```

    With a frozen backbone and a head of class statistics (the default) nothing is forgotten by construction: the order
    of lessons makes no difference, more samples of a class are merged exactly, and :meth:`forget` removes a class as if
    it had never been there. With a method that trains the backbone, each lesson is a task as in ``infssm run``.

    Args:
        model: name of a model; None chooses one that fits the first data, for a frozen backbone on images one with
            weights that come with infssm. Or a module of your own, with a classifier
            named ``head``, ``classifier``, ``score`` or ``fc``, which is replaced by one of the classes taught. The
            folder holds its weights, not its code: give the module again to :meth:`load`.
        transform: for a module of your own, maps a PIL image to its input ``[channels, height, width]``.
        weights: file or name of pre-trained weights. A frozen backbone keeps them; without them the first
            lesson trains it.
        method: as for ``infssm run``; see ``infssm list methods``.
        folder: where every change is written as a new version; None keeps the learner in memory until :meth:`save`.
        seed: seed of initial weights, order and augmentation.
        unknown: share of samples of known classes that may be called unknown; sets the threshold.
        settings: further settings, nested as in a config file: ``{"train": {"epochs": 8}}``.
    """

    def __init__(
        self,
        model: str | nn.Module | None = None,
        *,
        transform: Callable[[Image], Tensor] | None = None,
        weights: str | os.PathLike[str] | None = None,
        method: str = "frozen+gda",
        folder: str | os.PathLike[str] | None = None,
        seed: int = 0,
        unknown: float = 0.05,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 < unknown < 1:
            raise ConfigError(f"unknown={unknown} must lie between 0 and 1: it is a share of samples")
        self._samples: ImageFacts | None = None
        own: OwnModel | None = None
        if isinstance(model, nn.Module):
            if weights is not None:
                raise ConfigError("a module of your own has its weights: load them into it, and leave weights out")
            find_classifier(model)
            own, model = OwnModel(model, transform), f"{OWN}{type(model).__name__}"
        elif transform is not None:
            raise ConfigError("transform is for a module of your own: other models have their own preprocessing")
        chosen = {"name": model, "weights": None if weights is None else os.fspath(weights)}
        given: dict[str, Any] = {"model": {key: value for key, value in chosen.items() if value is not None}}
        # In this order: a name that is merged later would drop the options of the model that it replaces.
        given = merge({"method": {"name": method}, **given, "seed": seed}, dict(settings or {}))
        config = load_config(given)  # refuses what is no setting before it is looked at
        if config.model.weights is not None and config.model.weights in PACKAGED_FOR:
            given, self._samples = with_packaged(given, config.model.weights)
        if parse_name(config.method.name).base.freezes and (config.model.weights is not None or own is not None):
            given = merge({"train": {"task0": "skip"}}, given)
        if "classes" not in given["model"]:
            given = merge(given, {"model": {"classes": "grow"}})
        self._given, self._unknown, self._device = given, unknown, "cpu"
        self._now = Knowledge(load_config(given), own=own)
        self._before: Knowledge | None = None  # of a learner in memory, for undo
        self.folder = None if folder is None else _free(Path(folder))

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        version: int | None = None,
        device: str = "cpu",
        model: nn.Module | None = None,
        transform: Callable[[Image], Tensor] | None = None,
    ) -> Learner:
        """Open a learner, or a run of ``infssm run``, which can be taught more.

        Args:
            folder: folder of the learner or run.
            version: an older version of it; the current one by default.
            device: where to compute.
            model: the module, if the learner was made from one of your own.
            transform: the transform of that module.
        """
        learner = cls(model, transform=transform)
        learner.folder, learner._device, learner._unknown = Path(folder), device, 0.05
        versions = Versions(learner.folder)
        if versions.exists:
            versions.finish_removal()
            learner._open(versions, versions.current if version is None else version)
        elif version is not None:
            raise ConfigError(f"{folder} is a run without later lessons: it has no versions")
        else:
            learner._now = Knowledge.of_run(RunDirectory.open(folder), device)
        return learner

    # Its knowledge.

    @property
    def version(self) -> int:
        """Number of the current version; a change has a larger number than all versions before it."""
        return self._now.version

    @property
    def previous(self) -> int:
        """Number of the version that :meth:`undo` goes back to; 0 for none."""
        if self.folder is None:
            return 0 if self._before is None else self._before.version
        return self._now.parent

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes it knows; of a language model, of its domains."""
        facts = self._now.facts
        if facts is None:
            return ()
        return facts.classes if self._now.has_classes else tuple(dict.fromkeys(facts.domains))

    @property
    def has_classes(self) -> bool:
        """Whether it knows classes; a language model knows domains of text."""
        return self._now.has_classes

    @property
    def history(self) -> tuple[Lesson, ...]:
        """The lessons, oldest first."""
        return self._now.history

    @property
    def config(self) -> RunConfig:
        """All settings."""
        return self._now.config

    @property
    def modality(self) -> str | None:
        """Kind of data: ``images``, ``series``, ``tokens`` or ``language``; None before the first lesson."""
        return None if self._now.facts is None else self._now.facts.modality.name

    @property
    def classifier(self) -> TrainedClassifier:
        """Model, classes and preprocessing, as :func:`infssm.load` gives those of a run."""
        method, facts = self._now.taught()
        if not self._now.has_classes:
            raise ConfigError("a language model has no classes: use generate, or test it with evaluate")
        return TrainedClassifier(method.module, facts.classes, facts.samples, self._now.recipe, self._now.judge)

    @property
    def samples(self) -> SampleFacts:
        """Shape and kind of its images or sequences."""
        return self._now.taught()[1].samples

    def __repr__(self) -> str:
        return f"Learner({len(self.classes)} classes, {len(self.history)} lessons, version {self.version})"

    # Teaching.

    def learn(
        self,
        data: Any,
        labels: Any = None,
        *,
        name: str | None = None,
        listen: Listener | None = None,
        control: Control | None = None,
    ) -> Lesson:
        """Learn new classes, more samples of known ones, or both; of a language model, a new domain.

        If anything goes wrong, the learner stays as it was.

        Args:
            data: a folder with one folder per class, an .npz, or a name such as ``hf:...`` or ``text:folder``; samples,
                with ``labels``; a data set or loader of torch; a task of a :class:`~infssm.data.TaskStream`.
            labels: names or numbers, one per sample, or one name for all.
            name: name of the lesson; derived from the data by default.
            listen: called with the events of training.
            control: can stop training, in which case nothing is learnt.
        """
        started = time.monotonic()
        with self._alone():
            now = self._now
            taught, config, title = self._next_task(data, labels, name)
            now, setup = teach(now, config, taught, self._device, listen or (lambda _: None), control or Control())
            now, score = examine(now, setup, taught, self._unknown)
            over = datetime.now(timezone.utc).isoformat(timespec="seconds")
            lesson = Lesson(title, over, sample_counts(taught), score, round(time.monotonic() - started, 3))
            self._change(replace(now, history=(*now.history, lesson)))
        return lesson

    def _next_task(self, data: Any, labels: Any, name: str | None) -> tuple[TaughtTask, RunConfig, str]:
        """The task that the data make, the settings to learn it with, and the lesson's name."""
        facts, config = self._now.facts, self._now.config
        if isinstance(data, Task):
            config = config if facts is not None else resolve(load_config(self._given))
            return from_stream(data, facts), config, name or f"task {data.index + 1}"
        dataset = as_dataset(data, labels, config.data)
        if name is None:
            path = isinstance(data, (str, os.PathLike)) and labels is None
            name = Path(data).name.rpartition(":")[2] if path else f"lesson {len(self.history) + 1}"
        samples = (self._samples or dataset.facts) if facts is None else facts.samples
        if facts is None:
            given, pretrained = settings_for(dataset, self._given)
            samples = pretrained or samples
            config = resolve(load_config(given))
            if config.data.bands is not None:
                samples = in_bands(dataset, config.data.bands).facts
        dataset = samples.fit(dataset, self._now.recipe)
        return as_task(dataset, facts, name, samples=samples), config, name

    # Using it.

    def _answer(self) -> Callable[[list[SampleLike]], list[Prediction]]:
        now, classifier = self._now, self.classifier
        return lambda samples: now.predictions(now.features(classifier.transform(samples)))

    def stream(self) -> Stream[Prediction]:
        """Predictions on a sound or series while it arrives, chunk by chunk, in constant memory.

        ```python
        stream = learner.stream()
        for chunk in chunks:
            prediction = stream.push(chunk)
        ```

        For causal models (Mamba, Mamba-2, S4D). Later lessons do not change a stream that has begun.
        """
        now, classifier = self._now, self.classifier
        bare = copy.copy(unwrap(classifier.model))  # shares all layers but the classifier, which lets features through
        place = find_classifier(bare)
        if place.owner is bare:
            bare._modules = {**bare._modules, place.name: nn.Identity()}
        return Stream(bare, classifier.samples, lambda rows: now.predictions(rows.float())[0])

    def generate(
        self, prompt: Text, length: int, temperature: float = 1.0, top_p: float = 1.0, *, seed: int | None = None
    ) -> Text:
        """Continue a text with a language model, in constant time per token; the prompt is part of the result.

        Args:
            prompt: text, or ids ``[tokens]`` or ``[batch, tokens]``. Text is encoded as that of training was: as bytes,
                or by the tokenizer file in the settings, which must still be there.
            length: tokens to generate.
            temperature: divides the logits; 0 takes the most probable token.
            top_p: sample among the most probable tokens that together have this probability.
            seed: seed of the random draws; None draws differently every time.
        """
        method, facts = self._now.taught()
        if self._now.has_classes or not isinstance(facts.samples, TokenFacts):
            raise ConfigError(f"{self.modality} have classes: a language model generates, use predict")
        path = self.config.data.options.get("tokenizer") if isinstance(prompt, str) else None
        tokenizer = None if path is None else open_tokenizer(path)
        ids = facts.samples.read_prompt(prompt, tokenizer)
        draws = None if seed is None else torch.Generator().manual_seed(seed)
        found = generate(unwrap(method.module), ids, length, temperature, top_p, draws).cpu()
        if tokenizer is not None:
            return str(tokenizer.decode(found[0].tolist()))
        if isinstance(prompt, str):
            return bytes(found[0].tolist()).decode("utf-8", "replace")
        return found if prompt.ndim == 2 else found[0]

    def evaluate(self, data: Any, labels: Any = None) -> Evaluation:
        """Accuracy, overall and of each class, and confusions on data in any form that :meth:`learn` takes.

        Data with an official test part are tested on that part only; a language model is measured in bits.
        """
        method, facts = self._now.taught()
        dataset = facts.samples.fit(as_dataset(data, labels, self.config.data), self._now.recipe)
        if self._now.has_classes and (unknown := sorted(set(dataset.classes) - set(facts.classes))):
            raise DataError(
                f"the learner does not know the class {unknown[0]!r}: teach it, or leave it out of the test"
            )
        test = for_testing(dataset, facts)
        setup = Setup(self.config, test, facts, self._now.recipe, method)
        if not self._now.has_classes:
            nothing = Confusion(np.zeros((0, 0), dtype=np.int64), (), ())
            return Evaluation(math.nan, {}, nothing, math.nan, bits_of(setup, test.task, "test"))
        rows, truth = self._now.features_of(setup.eval_loader(test.task, "test"))
        logits, _, known = self._now.judge(rows)
        predicted, count = logits.argmax(1), len(facts.classes)
        table = torch.bincount(truth * count + predicted, minlength=count * count).view(count, count)
        right, samples = table.diagonal().tolist(), table.sum(1).tolist()
        per_class = {c: r / n for c, r, n in zip(facts.classes, right, samples, strict=True) if n}
        confusion = Confusion.of(table.tolist(), facts.classes, (count,))
        return Evaluation(sum(right) / sum(samples), per_class, confusion, 1 - float(known.double().mean()))

    @torch.no_grad()
    def shift(self, samples: list[SampleLike]) -> Shift:
        """How far unlabelled samples differ from what was taught: a two-sample test on distances to classes."""
        method, _ = self._now.taught()
        held_out = self._now.held_out
        if held_out is None or not method.head.fitted:
            raise ConfigError(
                "shift compares distances to classes: use a method with a fitted head, such as lda or gda"
            )
        usual = held_out_scores(method.head, held_out)[1]
        new = self._now.scores(self._now.features(self.classifier.transform(samples)))[1]
        assert usual is not None
        assert new is not None
        return shift(usual, new)

    # Changing what it knows.

    def forget(self, *classes: str, keep_versions: bool = False) -> str:
        """Remove classes from everything that is stored, including older versions, and report what remains of them.

        If no weights were trained on them, the folder is then that of a learner that never saw them.
        ``keep_versions`` keeps the older versions, which still know the classes.
        """
        with self._alone():
            now = self._now
            _, facts = now.taught()
            if missing := [name for name in classes if name not in facts.classes]:
                known = ", ".join(facts.classes[:10])
                raise ConfigError(f"the learner does not know a class {missing[0]!r}; it knows {known}")
            if not now.has_classes or facts.domains:
                raise ConfigError("a domain cannot be forgotten: its traces lie in the weights; go back with undo")
            if len(set(classes)) >= len(facts.classes):
                raise ConfigError("these are all classes of the learner: delete its folder instead")
            for name in dict.fromkeys(classes):
                now = now.without(name, unknown=self._unknown)
            self._change(now, only=not keep_versions)
        if self.folder is not None and RunDirectory(self.folder).is_run:
            return (
                "removed from the learner, but the files of the run it continues (weights, checkpoints) still hold them"
            )
        if now.trained:
            return (
                "removed from head, statistics and buffers, but the weights of the model were trained on their samples"
            )
        return "nothing computed from them remains"

    def undo(self) -> None:
        """Go back to the version before the last change; in memory, once."""
        with self._alone():
            before = self.previous
            if not before:
                raise ConfigError(
                    "there is no version before this one to go back to: it is the first, or forget removed those before"
                )
            if self.folder is None:
                assert self._before is not None
                self._now, self._before = self._before, None
                return
            versions = Versions(self.folder)
            self._open(versions, before)
            versions.point_to(before)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the learner to a folder, where changes are written from now on."""
        self._now.taught()
        self.folder, self._before = _free(Path(folder)), None
        with self._alone():
            self._change(self._now, only=True)

    def publish(self, folder: str | os.PathLike[str], config: RunConfig) -> None:
        """Write only the current version to a folder, with other settings; the learner keeps its own folder."""
        replace(self._now, config=config).write(Versions(Path(folder)), unknown=self._unknown, parent=0)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from changing the folder, and start from its newest version."""
        if self.folder is None:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        versions = Versions(self.folder)
        with versions.lock():
            if versions.exists and versions.current != self._now.version:
                self._open(versions, versions.current)
            yield

    def _open(self, versions: Versions, number: int) -> None:
        self._now, self._unknown = Knowledge.read(versions, number, self._device, self._now.own)

    def _change(self, now: Knowledge, *, only: bool = False) -> None:
        """Store what is known now as a new version and take it over; ``only`` removes the versions before."""
        if self.folder is None:
            self._before = None if only else self._now
            self._now = replace(now, version=self._now.version + 1)
            return
        versions, parent = Versions(self.folder), 0 if only else self._now.version
        if not only and not versions.exists and self._now.method is not None:  # a run, to which undo returns
            parent = self._now.write(versions, unknown=self._unknown, parent=0)
        number = now.write(versions, unknown=self._unknown, parent=parent)
        self._now = replace(now, version=number, parent=parent)


def load(
    folder: str | os.PathLike[str], *, task: int | None = None, device: str = "cpu", **own: Any
) -> Learner | TrainedClassifier:
    """Open a learner, or the model of a run, to classify images, sounds or series.

    ```python
    infssm.load("my-learner").predict("cat.jpg").label
    infssm.load("runs/digits-5/seq/vim_nano/seed0-1a2b3c4d").predict("seven.png").label
    ```

    Args:
        folder: folder of a learner or a run.
        task: for a run, use the model after this task (0-based); the last one by default.
        device: where to compute.
        **own: ``model`` and ``transform`` of a learner that was made of a module of your own.
    """
    if task is None and (Path(folder) / POINTER).is_file():
        return Learner.load(folder, device=device, **own)
    return load_classifier(folder, task=task, device=device)


def is_stored(folder: Path) -> bool:
    """Whether a folder holds a learner, or a run, which a learner can continue."""
    return Versions(folder).exists or RunDirectory(folder).is_run


def _free(folder: Path) -> Path:
    if is_stored(folder):
        raise ConfigError(f"{folder} holds a learner or a run: open it with infssm.Learner.load({str(folder)!r})")
    return folder
