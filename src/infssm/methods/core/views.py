"""What a fitted head is given of an image, where that is more than the classifier in training sees.

A second token, a second look (the mirror image) and a second model (the one that the first task left) cost no images
of old tasks. Training does not change: they are features for the fitted head alone, when it is fitted and when it
classifies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.contract import ComponentConfig, Context
from infssm.models import Backbone
from infssm.models.features import ImageHead, find_classifier
from infssm.ssm import unwrap


class FittedConfig(ComponentConfig):
    """Options of every fitted head."""

    mean_token: bool = Field(
        False, description="images: features are also the mean of all tokens, beside the class token"
    )
    mirror: bool = Field(
        False,
        description="images: features are averaged over the image and its mirror image; not where mirrored means "
        "something else, as with digits",
    )
    first_model: bool = Field(
        False,
        description="images: features are also those of the model as the first task left it, a frozen copy beside the "
        "one that goes on learning; likelihoods of both are averaged (lda, gda)",
    )


class Looks(nn.Module):
    """Features of images ``[b, models · tokens · d]`` for a fitted head; ``first`` is the first task's model."""

    first: nn.Module | None

    def __init__(self, config: FittedConfig) -> None:
        super().__init__()
        self.config = config
        self.first = None

    @property
    def models(self) -> int:
        """How many models look; each gives an equal part of the features, the first one first."""
        return 1 + self.config.first_model

    def width(self, features: int) -> int:
        """Width of all features, where the classifier in training is given ``features``."""
        return features * self.models * (1 + self.config.mean_token)

    def forward(self, model: Any, x: Tensor) -> Tensor:
        """Features of ``x: [b, c, h, w]`` under ``model`` now, after those of the first task's."""
        models = [self.first, model] if self.config.first_model else [model]
        sides = [x.flip(-1), x] if self.config.mirror else [x]  # the image last: states that are recorded are of it
        looks = [torch.cat([self._tokens(one, side) for one in models], dim=1) for side in sides]
        return sum(looks[1:], start=looks[0]) / len(looks)

    def _tokens(self, model: Any, x: Tensor) -> Tensor:
        features: Tensor = model.forward_features(x)
        pooled: Tensor = model.pool(features)
        return torch.cat([pooled, features.mean(dim=1)], dim=1) if self.config.mean_token else pooled

    def keep(self, model: nn.Module) -> None:
        """Take ``model`` as it is now for the first task's."""
        if self.config.first_model:
            self.first = copy.deepcopy(model)
            find_classifier(self.first).replace(nn.Identity())
            self.first.eval().requires_grad_(False)

    def restore(self, model: nn.Module, first: Mapping[str, Tensor] | None) -> None:
        """Keep a model of these tensors, built like ``model``; none without them."""
        if not first:
            self.first = None
            return
        self.keep(model)
        if self.first is not None:
            self.first.load_state_dict(first)


class Looking(ImageHead):
    """A fitted head with its looks, in the classifier's place: images to logits."""

    def __init__(self, looks: Looks, fitted: nn.Module) -> None:
        super().__init__()
        self.looks = looks
        self.fitted = fitted

    def logits(self, model: nn.Module, x: Tensor) -> Tensor:
        """Of ``x: [b, c, h, w]``: ``[b, K]``."""
        scores: Tensor = self.fitted(self.looks(model, x))
        return scores


def looks_of(config: ComponentConfig) -> Looks | None:
    """The looks that a head's options ask for; none where it sees what the classifier in training does."""
    asked = isinstance(config, FittedConfig) and (config.mean_token or config.mirror or config.first_model)
    return Looks(config) if asked and isinstance(config, FittedConfig) else None


def check_looks(config: ComponentConfig, context: Context, head: str) -> None:
    """Refuse options for which data or model have nothing to look at."""
    if looks_of(config) is None or not isinstance(config, FittedConfig):
        return
    asked = next(name for name in FittedConfig.model_fields if getattr(config, name))
    model = unwrap(context.module)
    if not context.modality.augmented:
        raise ConfigError(f"{head}: {asked} is for images, and the samples are {context.modality.name}")
    if not isinstance(model, Backbone) or type(model).forward is not Backbone.forward:
        raise ConfigError(
            f"{head}: {asked} works on a bare backbone for images of infssm.list_models(), not on a "
            f"{type(model).__name__} (l2p-r and clfd wrap the model in one of their own)"
        )
    if config.mean_token and model.cls_index is None:
        raise ConfigError(f"{head}: the features of {type(model).__name__} are the mean of its tokens: no mean_token")
