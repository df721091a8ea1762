"""Build what a run works with from its configuration: stream, recipe, model, method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from infssm._memory import describe_bytes, memory_here
from infssm._processes import ALONE, Share, this_share
from infssm.data import (
    Dataset,
    ImageLoader,
    Mixing,
    Recipe,
    SequenceLoader,
    Split,
    StreamFacts,
    Task,
    TaskStream,
    few_shots,
    in_bands,
    in_stream_order,
    load_dataset,
    make_mixing,
    make_split,
    require_readable,
)
from infssm.data.loader import Part
from infssm.errors import ConfigError, MissingDataError
from infssm.learner.config.fields import DataConfig, RunConfig
from infssm.learner.metrics import Measure
from infssm.learner.modeling import OwnModel, any_model, build_method_and_recipe, known_facts
from infssm.learner.scoring import SCORES, score_of
from infssm.methods import Method, method_options, parse_name
from infssm.models import check_weights


@dataclass(frozen=True)
class Setup:
    """The parts of a run; all follow from the configuration, except the process's share of the work."""

    config: RunConfig
    stream: TaskStream
    facts: StreamFacts
    """What the method was built for: the tasks that have arrived, or the whole stream."""
    recipe: Recipe | None
    """How images are transformed; None for sequences."""
    mixing: Mixing | None
    method: Method
    share: Share = ALONE

    def task(self, index: int) -> Task:
        """Task ``index`` as the method sees it: joint training gets all earlier tasks' images too."""
        return self.stream.cumulative(index) if self.method.base.joint else self.stream[index]

    def grown(self, task: int) -> Setup:
        """The setup once ``task`` has arrived: method and model are built again where it brings new classes."""
        facts = known_facts(self.config, self.stream.facts, task)
        if facts.num_outputs == self.facts.num_outputs:
            return replace(self, facts=facts)
        old = self.method
        method, recipe = build_method_and_recipe(self.config, facts, old.context.device, weights=False)
        method.grow_from(old.state_dict(), old.module.state_dict())
        return replace(self, facts=facts, method=method, recipe=recipe, mixing=_mixing(self.config, facts, recipe))

    def epochs(self, task: int) -> int:
        """Epochs to train on a task; 0 where it starts from given weights, or where training makes no difference."""
        train = self.config.train
        if task > 0:
            return train.epochs if self.method.trains(task) else 0
        return (train.task0_epochs or train.epochs) if train.task0 in ("train", "own") else 0

    @property
    def measure(self) -> Measure:
        """The score of the model on each task."""
        return score_of(self.stream).measure(self.stream)

    def train_loader(self, task: Task, epoch: int, *, skip: int = 0) -> ImageLoader | SequenceLoader:
        """Training batches of one epoch: this process's share of each."""
        batch_size = self.config.train.batch_size // self.share.world
        images = {"mixing": self.mixing, "with_raw": self.method.base.needs_raw}
        order = {"in_order": True} if self.config.data.online else {"drop_last": True}
        return self._loader(task, "train", images, batch_size=batch_size, epoch=epoch, skip_batches=skip, **order)

    def statistics_loader(self, task: Task) -> ImageLoader | SequenceLoader:
        """All training images of a task with hard labels, for what methods measure before and after it.

        Each process gets its share, in equally many batches; methods add up what the processes measured.
        """
        batch_size = self.config.train.batch_size // self.share.world
        images = {"with_raw": self.method.base.needs_raw}
        return self._loader(task, "train", images, batch_size=batch_size, epoch=self.epochs(task.index))

    def plain_loader(self, task: Task) -> ImageLoader | SequenceLoader:
        """All training images of a task through the evaluation transform, for heads: every image on one process."""
        return self.eval_loader(task, "train", augment=False)

    def eval_loader(self, task: Task, part: Part, *, augment: bool | None = None) -> ImageLoader | SequenceLoader:
        """Images of a task to evaluate on: every image on exactly one process; ``augment``: see ``ImageLoader``."""
        train = self.config.train
        batch_size = train.eval_batch_size or 2 * train.batch_size
        return self._loader(task, part, {"augment": augment}, batch_size=batch_size, shuffle=False)

    def _loader(
        self, task: Task, part: Part, images: Mapping[str, Any], **options: Any
    ) -> ImageLoader | SequenceLoader:
        """Batches of a part of a task; the options ``images`` are only for images."""
        options |= {"seed": self.config.seed, "share": self.share}
        if self.recipe is None:
            return SequenceLoader(task, part, **options)
        workers = self.config.train.num_workers
        return ImageLoader(task, part, recipe=self.recipe, num_workers=workers, **images, **options)


def check_config(config: RunConfig) -> None:
    """Raise for unknown names and options, and for models that cannot be built, before any work is done."""
    method_options(config.method.name, config.method.options)
    base, train = parse_name(config.method.name)[0], config.train
    if not base.supports_soft_labels and (train.mixing != "none" or train.label_smoothing > 0):
        raise ConfigError(
            f"{base.name} trains on class labels, so it cannot take train.mixing={train.mixing} with "
            f"train.label_smoothing={train.label_smoothing:g}: set train.mixing=none train.label_smoothing=0"
        )
    _check_model(config.model.name, json.dumps(config.model.options, sort_keys=True))


@lru_cache(maxsize=32)
def _check_model(name: str, options: str) -> None:
    """Build the model once, to see that it can be; training takes its gradients and AdamW's two moments besides."""
    with torch.random.fork_rng(devices=[]):
        model = any_model(name, json.loads(options))
    needed = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    there = memory_here()
    if there is not None and needed > there:
        raise ConfigError(
            f"to train model {name!r} with {options} takes {describe_bytes(needed)} or more, and this machine has "
            f"{describe_bytes(there)}: make it smaller"
        )


def load_stream(config: RunConfig, split: Split | None = None) -> TaskStream:
    """The stream of tasks, with a stored split or the one the configuration draws."""
    data = config.data
    dataset = read_dataset(data)
    by = data.by or dataset.modality.by
    if by in ("domain", dataset.domain_word) and dataset.domain_of is not None:
        by = "domain"
    elif by != "class":
        words = ["class"] + ([dataset.domain_word] if dataset.domain_of is not None else [])
        raise ConfigError(f"data.by={by}: {dataset.name} makes tasks by {' or '.join(words)}")
    if data.shots is not None and by == "domain":
        raise ConfigError("data.shots counts samples of new classes: make tasks by class, or leave it out")

    if data.online and not SCORES[dataset.modality.scoring].has_classes:
        raise ConfigError(f"data.online measures accuracy along the stream, and {dataset.name} has no classes")

    def stream_of(split: Split) -> TaskStream:
        return TaskStream(
            dataset,
            split,
            data.num_tasks,
            class_order_seed=config.seed if data.class_order_seed == "run" else data.class_order_seed,
            base_classes=data.base_classes,
            tasks=data.tasks,
            by="domain" if by == "domain" else "class",
        )

    if split is not None:
        return stream_of(split).merged() if data.online else stream_of(split)
    split = make_split(
        dataset, seed=data.split_seed, train_per_class=data.train_per_class, test_per_class=data.test_per_class
    )
    stream = stream_of(split)
    if data.online:
        return stream_of(in_stream_order(stream, data.blur, config.seed)).merged()
    if data.shots is None:
        return stream
    return stream_of(few_shots(split, dataset, stream.class_order[stream.task_sizes[0] :], data.shots))


def check_data(config: RunConfig, split: Split) -> None:
    """Raise DataError if the data are no longer those of a stored split; missing data are not checked."""
    with suppress(MissingDataError):
        split.verify(read_dataset(config.data))


def read_dataset(data: DataConfig) -> Dataset:
    """The data set that a configuration names, in frequency bands where it asks for them."""
    options = dict(data.options)
    if data.name.startswith("hf:") and data.by not in (None, "class", "domain"):
        options.setdefault("domain", data.by)
    dataset = load_dataset(data.name, data.root, **options)
    return in_bands(require_readable(dataset, skip_unreadable=data.skip_unreadable), data.bands)


def build(
    config: RunConfig,
    device: torch.device,
    split: Split | None = None,
    *,
    stream: TaskStream | None = None,
    task: int | None = None,
    weights: bool = True,
    task0: Path | None = None,
) -> Setup:
    """Load the data, build model and method; initial weights depend only on the seed.

    Args:
        config: the configuration of the run.
        device: where the model works.
        split: a stored split; None draws the one of the configuration.
        stream: data that are loaded already.
        task: the last task that has arrived; None builds the method for the whole stream.
        weights: False leaves out the weights to start from, for a run that loads its own.
        task0: weights after task 0, where the configuration starts from a shared model.
    """
    if weights and config.model.weights is not None:
        check_weights(config.model.weights)
    stream = stream or load_stream(config, split)
    facts = stream.facts if task is None else known_facts(config, stream.facts, task)
    return make_setup(config, stream, facts, device, weights=weights, task0=task0)


def make_setup(
    config: RunConfig,
    stream: TaskStream,
    facts: StreamFacts,
    device: torch.device,
    *,
    weights: bool = True,
    task0: Path | None = None,
    own: OwnModel | None = None,
) -> Setup:
    """Build model and method for what is known of a stream; see :func:`build`. ``own`` is a user's own module."""
    method, recipe = build_method_and_recipe(config, facts, device, weights=weights, task0=task0, own=own)
    return Setup(config, stream, facts, recipe, _mixing(config, facts, recipe), method, this_share())


def _mixing(config: RunConfig, facts: StreamFacts, recipe: Recipe | None) -> Mixing | None:
    if recipe is None:
        return None
    return make_mixing(facts.num_outputs, config.train.mixing, label_smoothing=config.train.label_smoothing)
