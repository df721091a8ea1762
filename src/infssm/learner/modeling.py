"""The model of a configuration, made for the data of a stream."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from infssm.data import PerImageRecipe, StreamFacts
from infssm.errors import ConfigError
from infssm.learner.config.fields import ModelConfig
from infssm.models import create_model, kinds_of_model, list_models
from infssm.models.features import find_classifier
from infssm.models.hub import HubModel, hub_model, is_hub
from infssm.ssm.accelerate import accelerate

if TYPE_CHECKING:
    from PIL.Image import Image

OWN = "own:"
"""What the name of a user's own module begins with in the settings; the name of its class follows."""


@dataclass(frozen=True)
class OwnModel:
    """A user's own module. Its weights are stored with a learner, its code is not, so it is given again to load it.

    Attributes:
        module: as it was given; it is never changed.
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
    check_fits(config.name, facts)
    if not is_hub(config.name):
        options = facts.modality.model_options(len(facts.classes), facts.samples.size) | config.options
        model: nn.Module = create_model(config.name, weights=config.weights if weights else None, **options)
        return model
    found = _from_hub(config.name, config.options, weights=weights)
    if found.num_classes < facts.num_outputs:
        raise ConfigError(
            f"the model knows {found.num_classes} tokens and the text has {facts.num_outputs}: give the model's own "
            "tokenizer, data.options.tokenizer=FILE"
        )
    return accelerate(found)  # our scans in place of its loops over tokens, where it has layers that we know


def any_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration before its data are known, to see that it can be built."""
    model: nn.Module = _from_hub(name, options, weights=False) if is_hub(name) else create_model(name, **options)
    return model


def _from_hub(name: str, options: Mapping[str, Any], *, weights: bool) -> HubModel:
    trusted = options.get("trust_remote_code", False)
    if options.keys() - {"trust_remote_code"} or not isinstance(trusted, bool):
        raise ConfigError(
            f"model {name!r} is as its folder says: its only model.options is trust_remote_code, true or false"
        )
    return hub_model(name, weights=weights, trust_remote_code=trusted)


def check_fits(name: str, facts: StreamFacts) -> None:
    """Raise for a model that is made for other data, with those that are for these."""
    taken = HubModel.supported_data if is_hub(name) else kinds_of_model(name)
    if not facts.modality.supported_by(taken):
        fitting = ", ".join(other for other in list_models() if facts.modality.supported_by(kinds_of_model(other)))
        raise ConfigError(
            f"model {name!r} is for {' and '.join(sorted(taken))}, and {facts.samples.name} is {facts.modality.name}: "
            f"choose model= {fitting}"
        )
