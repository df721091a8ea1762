"""Build what a run works with from its configuration: stream, recipe, model, method."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from infssm._machine import describe_bytes, memory_here
from infssm._processes import ALONE, Share, this_share
from infssm._seeding import seed_all
from infssm.data import (
    Dataset,
    ImageLoader,
    Mixing,
    PerImageRecipe,
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
    make_recipe,
    make_split,
    require_readable,
    strong_recipe,
)
from infssm.data.loader import Part
from infssm.errors import CheckpointError, ConfigError, MissingDataError
from infssm.learner.config.fields import TASK0_KINDS, DataConfig, ModelConfig, RunConfig
from infssm.learner.metrics import Quantity
from infssm.learner.scoring import SCORES, score_of
from infssm.learner.store.layout import read_checked
from infssm.methods import Method, Transforms, build_method, check_suits, method_options, parse_name
from infssm.models import Backbone, check_weights, create_model, find_weights, kinds_of_model, list_models
from infssm.models.features import find_classifier, training_weights, with_rows_of
from infssm.models.hub import PREFIX, HubModel, hub_model
from infssm.ssm.accelerate import accelerate

if TYPE_CHECKING:
    from PIL.Image import Image

OWN = "own:"
"""Prefix of the name of a user's own module in the settings; the name of its class follows."""


@dataclass(frozen=True)
class OwnModel:
    """A user's own module. Its weights are stored with a learner, its code is not, so it is given again to load it.

    Attributes:
        module: the given module; it is never changed.
        transform: from a PIL image to model input ``[channels, height, width]``; None for that of the package, and for
            sequences.
    """

    module: nn.Module
    transform: Callable[[Image], Tensor] | None = None

    def build(self, num_outputs: int) -> nn.Module:
        """A copy whose classifier has so many outputs, freshly initialized."""
        model = copy.deepcopy(self.module)
        place = find_classifier(model)
        like = next(model.parameters())
        place.replace(nn.Linear(place.in_features, num_outputs, device=like.device, dtype=like.dtype))
        return model

    def recipe(self, channels: int) -> PerImageRecipe | None:
        """The transform as a recipe, in training and in evaluation; None without one."""
        if self.transform is None:
            return None
        from PIL import Image as pil

        found = self.transform(pil.new("RGB" if channels == 3 else "L", (64, 64)))
        if not isinstance(found, Tensor) or found.ndim != 3 or found.dtype != torch.float32:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                f"transform must make float32 [channels, height, width] of a PIL image, and it makes {what}"
            )
        size = max(found.shape[1:])
        return PerImageRecipe(self.transform, self.transform, size=size, raw_size=size)


def build_model(config: ModelConfig, facts: StreamFacts, *, weights: bool = True) -> nn.Module:
    """Build the model with as many inputs and outputs as the data have; ``weights=False`` leaves its weights out."""
    if config.name.startswith(PREFIX):
        _check_fits(config.name, HubModel.supported_data, facts)
        found = _from_hub(config.name, config.options, weights=weights)
        if found.num_classes < facts.num_outputs:
            raise ConfigError(
                f"the model knows {found.num_classes} tokens and the text has {facts.num_outputs}: give the model's "
                "own tokenizer, data.options.tokenizer=FILE"
            )
        return accelerate(found)  # our scans in place of its loops over tokens, if it has layers that we know
    options = facts.modality.model_options(len(facts.classes), facts.samples.size) | config.options
    try:
        model: nn.Module = create_model(config.name, weights=config.weights if weights else None, **options)
    except ConfigError:  # options that a model for other data does not have: that it is for other data says more
        _check_fits(config.name, kinds_of_model(config.name), facts)
        raise
    _check_fits(config.name, getattr(model, "supported_data", Backbone.supported_data), facts)
    return model


def any_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration before its data are known, to see that it can be built."""
    model: nn.Module = (
        _from_hub(name, options, weights=False) if name.startswith(PREFIX) else create_model(name, **options)
    )
    return model


def _from_hub(name: str, options: Mapping[str, Any], *, weights: bool) -> HubModel:
    trusted = options.get("trust_remote_code", False)
    if options.keys() - {"trust_remote_code"} or not isinstance(trusted, bool):
        raise ConfigError(
            f"model {name!r} is as its folder says: its only model.options is trust_remote_code, true or false"
        )
    return hub_model(name, weights=weights, trust_remote_code=trusted)


def _check_fits(name: str, kinds: frozenset[str], facts: StreamFacts) -> None:
    """Raise for a model that is made for other ``kinds`` of data, with the models that are for these."""
    if not facts.modality.supported_by(kinds):
        fitting = ", ".join(other for other in list_models() if facts.modality.supported_by(kinds_of_model(other)))
        raise ConfigError(
            f"model {name!r} is for {' and '.join(sorted(kinds))}, and {facts.samples.name} is {facts.modality.name}: "
            f"choose model= {fitting}"
        )


def known_facts(config: RunConfig, facts: StreamFacts, task: int) -> StreamFacts:
    """The stream up to ``task``; the whole stream if ``model.classes`` is 'all'."""
    known = facts.up_to(task)
    # A single class of token sequences would read as language, which has no classes.
    return facts if config.model.classes == "all" or known.modality is not facts.modality else known


def build_method_and_recipe(
    config: RunConfig,
    facts: StreamFacts,
    device: torch.device,
    *,
    weights: bool = True,
    task0: Path | None = None,
    own: OwnModel | None = None,
    regularizers: bool = True,
) -> tuple[Method, Recipe | None]:
    """The method with its model, and the recipe of its images; the data need not be there.

    ``regularizers=False`` leaves them out, where the model only predicts.
    """
    data, train = config.data, config.train
    check_suits(config.method.name, facts.modality.name, domains=bool(facts.domains))
    seed_all(config.seed, "model")
    model = build_model(config.model, facts, weights=weights) if own is None else own.build(facts.num_outputs)
    recipe: Recipe | None = None
    transforms = None
    if facts.modality.augmented:
        height, width = getattr(model, "img_size", (None, None))  # pixels of the images that the model was made for
        size = height if data.recipe == "deit" and height == width else None
        recipe = (own and own.recipe(facts.images.channels)) or make_recipe(
            data.recipe,
            facts.images,
            size=data.image_size or size,
            eval_normalization=data.eval_normalization,
            val_transform=data.val_transform,
        )
        transforms = Transforms(recipe.train, recipe.eval, strong_recipe(recipe).train)
        if (resize := getattr(model, "set_input_size", None)) is not None:
            resize(recipe.size)
    elif train.mixing != "none" or train.label_smoothing:
        raise ConfigError("sequences are not mixed or smoothed: set train.mixing=none train.label_smoothing=0")
    if weights and (task0 is not None or train.task0 not in TASK0_KINDS):
        try:
            found = task0 or find_weights(train.task0)  # which may be named as `model.weights` may
        except CheckpointError as error:
            raise CheckpointError(f"train.task0: cannot read the weights: {error}") from None
        load_weights(model, found)
    method = build_method(
        model.to(device),
        config.method.name,
        num_classes=facts.num_outputs,
        num_tasks=len(facts.task_sizes),
        task_sizes=facts.task_sizes,
        data_kind=facts.modality.name,
        domains=bool(facts.domains),
        transforms=transforms,
        regularizers=regularizers,
        seed=config.seed,
        **config.method.options,
    )
    method.module.to(device)
    return method, recipe


def load_weights(into: nn.Module | Method, path: Path) -> None:
    """Load the weights that a run saved after a task (``task_00.safetensors``).

    A method built like the run's gets the head that the run had reached; a model, to train on, the classifier that was
    in training.
    """
    try:
        weights = load(read_checked(path))
        if isinstance(into, Method):
            into.load_weights(weights)
        else:
            into.load_state_dict(with_rows_of(training_weights(into, weights), into))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the weights {path}: {error}") from None
    except RuntimeError as error:
        raise CheckpointError(f"the weights {path} do not fit the model: {error}") from None


@dataclass(frozen=True)
class Setup:
    """The parts of a run; all follow from the configuration, except the process's share of the work."""

    config: RunConfig
    stream: TaskStream
    facts: StreamFacts
    """What the method was built for: the tasks that have arrived, or the whole stream."""
    recipe: Recipe | None
    """How images are transformed; None for sequences."""
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
        return replace(self, facts=facts, method=method, recipe=recipe)

    def epochs(self, task: int) -> int:
        """Epochs to train on a task; 0 where it starts from given weights, or where training makes no difference."""
        train = self.config.train
        if task > 0:
            return train.epochs if self.method.trains(task) else 0
        return (train.task0_epochs or train.epochs) if train.task0 in ("train", "own") else 0

    @property
    def mixing(self) -> Mixing | None:
        """How training images and their labels are mixed; None where they are not, and for sequences."""
        if self.recipe is None:
            return None
        train = self.config.train
        return make_mixing(self.facts.num_outputs, train.mixing, label_smoothing=train.label_smoothing)

    @property
    def quantity(self) -> Quantity:
        """The score of the model on each task."""
        return score_of(self.stream).quantity(self.stream)

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
    own: OwnModel | None = None,
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
        own: a user's own module in the place of the configuration's model.
    """
    if weights and config.model.weights is not None:
        check_weights(config.model.weights)
    stream = stream or load_stream(config, split)
    facts = stream.facts if task is None else known_facts(config, stream.facts, task)
    method, recipe = build_method_and_recipe(config, facts, device, weights=weights, task0=task0, own=own)
    return Setup(config, stream, facts, recipe, method, this_share())
