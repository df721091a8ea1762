"""The model of a configuration, made for the data of a stream, and the method that holds it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from infssm._seeding import seed_all
from infssm.data import PerImageRecipe, StreamFacts, make_recipe, strong_recipe
from infssm.data.recipes import Recipe
from infssm.errors import CheckpointError, ConfigError
from infssm.learner.config.fields import TASK0_KINDS, ModelConfig, RunConfig
from infssm.learner.store.layout import read_checked
from infssm.methods import Method, Transforms, build_method, check_suits
from infssm.models import Backbone, create_model, find_weights, kinds_of_model, list_models
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
