"""The model of a configuration, made for the data of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from infssm.data import StreamFacts
from infssm.errors import ConfigError
from infssm.learner.config.fields import ModelConfig
from infssm.models import create_model, kinds_of_model, list_models
from infssm.models.hub import HubModel, hub_model, is_hub
from infssm.ssm.accelerate import accelerate


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
