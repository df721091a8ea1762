"""From a configuration to the things a run works with: stream, recipe, model, method."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from infssm._memory import describe_bytes, memory_here
from infssm._processes import ALONE, Share, this_share
from infssm._seeding import seed_all
from infssm.data import (
    Split,
    StreamFacts,
    Task,
    TaskStream,
    load_dataset,
    make_loader,
    make_mixing,
    make_recipe,
    make_split,
    require_readable,
    strong_recipe,
)
from infssm.data.loader import ImageLoader, Part
from infssm.data.recipes import Mixing, Recipe
from infssm.errors import CheckpointError, ConfigError
from infssm.methods import Method, Transforms, build_method, method_options, parse_name
from infssm.models import check_weights, create_model
from infssm.models.features import training_weights
from infssm.runs import read_checked
from infssm.train.config import RunConfig


@dataclass(frozen=True)
class Setup:
    """What a run works with; all of it follows from the configuration, but the process's share of the work."""

    config: RunConfig
    stream: TaskStream
    recipe: Recipe
    mixing: Mixing | None
    method: Method
    share: Share = ALONE

    def task(self, index: int) -> Task:
        """Task ``index`` as the method sees it: joint training gets all earlier tasks' images too."""
        return self.stream.cumulative(index) if self.method.base.joint else self.stream[index]

    def epochs(self, task: int) -> int:
        """Epochs to train on a task; 0 where it starts from given weights, or where training makes no difference."""
        train = self.config.train
        if task > 0:
            return train.epochs if self.method.trains(task) else 0
        return (train.task0_epochs or train.epochs) if train.task0 == "train" else 0

    def train_loader(self, task: Task, epoch: int, *, skip: int = 0) -> ImageLoader:
        """Training batches of one epoch: this process's share of each."""
        train = self.config.train
        return make_loader(
            task,
            "train",
            recipe=self.recipe,
            batch_size=train.batch_size // self.share.world,
            seed=self.config.seed,
            epoch=epoch,
            mixing=self.mixing,
            num_workers=train.num_workers,
            drop_last=True,
            skip_batches=skip,
            share=self.share,
            with_raw=self.method.base.needs_raw,
        )

    def statistics_loader(self, task: Task) -> ImageLoader:
        """All training images of a task with hard labels, for what methods measure before and after it.

        Each process gets its share, in equally many batches; methods add up what the processes measured.
        """
        return make_loader(
            task,
            "train",
            recipe=self.recipe,
            batch_size=self.config.train.batch_size // self.share.world,
            seed=self.config.seed,
            epoch=self.epochs(task.index),
            num_workers=self.config.train.num_workers,
            share=self.share,
            with_raw=self.method.base.needs_raw,
        )

    def plain_loader(self, task: Task) -> ImageLoader:
        """All training images of a task through the evaluation transform, for heads: every image on one process."""
        return self.eval_loader(task, "train", augment=False)

    def eval_loader(self, task: Task, part: Part, *, augment: bool | None = None) -> ImageLoader:
        """Images of a task to evaluate on: every image on exactly one process; ``augment``: see ``make_loader``."""
        train = self.config.train
        return make_loader(
            task,
            part,
            recipe=self.recipe,
            batch_size=train.eval_batch_size or 2 * train.batch_size,
            seed=self.config.seed,
            shuffle=False,
            augment=augment,
            num_workers=train.num_workers,
            share=self.share,
        )


def check_config(config: RunConfig) -> None:
    """Raise for names and options that no room knows, and for models that cannot be built, before any work is done."""
    method_options(config.method.name, config.method.options)
    _check_targets(config)
    _check_model(config.model.name, json.dumps(config.model.options, sort_keys=True))


@lru_cache(maxsize=32)
def _check_model(name: str, options: str) -> None:
    """Build the model once, to see that it can be; training takes its gradients and AdamW's two moments besides."""
    with torch.random.fork_rng(devices=[]):
        model = create_model(name, **json.loads(options))
    needed = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    there = memory_here()
    if there is not None and needed > there:
        raise ConfigError(
            f"to train model {name!r} with {options} takes {describe_bytes(needed)} or more, and this machine has "
            f"{describe_bytes(there)}: make it smaller"
        )


def _check_targets(config: RunConfig) -> None:
    """Mixed and smoothed targets need a base that can train on them."""
    base, train = parse_name(config.method.name)[0], config.train
    if not base.takes_soft_labels and (train.mixing != "none" or train.label_smoothing > 0):
        raise ConfigError(
            f"{base.name} trains on class labels, so it cannot take train.mixing={train.mixing} with "
            f"train.label_smoothing={train.label_smoothing:g}: set train.mixing=none train.label_smoothing=0"
        )


def load_stream(config: RunConfig, split: Split | None = None) -> TaskStream:
    """The stream of tasks, with a stored split or the one the configuration draws."""
    data = config.data
    dataset = load_dataset(data.name, data.root, **data.options)
    dataset = require_readable(dataset, skip_unreadable=data.skip_unreadable)
    if split is None:
        split = make_split(
            dataset, seed=data.split_seed, train_per_class=data.train_per_class, test_per_class=data.test_per_class
        )
    return TaskStream(
        dataset,
        split,
        data.num_tasks,
        class_order_seed=config.seed if data.class_order_seed == "run" else data.class_order_seed,
        base_classes=data.base_classes,
        tasks=data.tasks,
    )


def build(config: RunConfig, device: torch.device, split: Split | None = None, *, weights: bool = True) -> Setup:
    """Load the data, build model and method; initial weights depend on the seed alone.

    ``weights=False`` leaves out the weights to start from, for a run that loads its own.
    """
    if weights and config.model.weights is not None:
        check_weights(config.model.weights)
    stream, train = load_stream(config, split), config.train
    method, recipe = build_learner(config, stream.facts, device, weights=weights)
    mixing = make_mixing(stream.num_classes, train.mixing, label_smoothing=train.label_smoothing)
    return Setup(config, stream, recipe, mixing, method, this_share())


def build_learner(
    config: RunConfig, facts: StreamFacts, device: torch.device, *, weights: bool = True
) -> tuple[Method, Recipe]:
    """The method with its model, and the recipe of its images; the data need not be there."""
    data, train = config.data, config.train
    seed_all(config.seed, "model")
    model = create_model(
        config.model.name,
        num_classes=len(facts.classes),
        weights=config.model.weights if weights else None,
        **{"in_chans": facts.images.channels} | config.model.options,
    )
    recipe = make_recipe(
        data.recipe,
        facts.images,
        size=data.image_size or (_own_size(model) if data.recipe == "deit" else None),
        eval_normalization=data.eval_normalization,
        val_transform=data.val_transform,
    )
    if (resize := getattr(model, "set_input_size", None)) is not None:
        resize(recipe.size)
    if weights and train.task0 != "train":
        load_weights(model, Path(train.task0))
    method = build_method(
        model.to(device),
        config.method.name,
        num_classes=len(facts.classes),
        num_tasks=len(facts.task_sizes),
        task_sizes=facts.task_sizes,
        transforms=Transforms(recipe.train, recipe.eval, strong_recipe(facts.images, recipe).train),
        seed=config.seed,
        **config.method.options,
    )
    method.module.to(device)
    return method, recipe


def _own_size(model: nn.Module) -> int | None:
    """Pixels of the square images a model was made for, if it was."""
    height, width = getattr(model, "img_size", (None, None))
    return height if height == width else None


def load_weights(into: nn.Module | Method, path: Path) -> None:
    """Load the weights that a run saved after a task (``task_00.safetensors``).

    A method built like the run's gets the head that the run had reached; a model, to train on, the classifier that was
    in training.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        weights = load(read_checked(path))
        if isinstance(into, Method):
            into.load_weights(weights)
        else:
            into.load_state_dict(training_weights(into, weights))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the weights {path}: {error}") from None
    except RuntimeError as error:
        raise CheckpointError(f"the weights {path} do not fit the model: {error}") from None
