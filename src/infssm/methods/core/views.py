"""Additional views of an image for a fitted head: features beyond those that the trained classifier is given.

Statistics of all tokens, earlier blocks, the mirror image and the model after the first task need no images of old
tasks. Training does not change: the views are features only for the fitted head, when it is fitted and when it
classifies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.core.context import Context
from infssm.methods.core.contract import ComponentConfig
from infssm.models import Backbone
from infssm.models.features import find_classifier
from infssm.models.vim import VisionMamba
from infssm.ssm import unwrap


class FittedConfig(ComponentConfig):
    """Options of every fitted head."""

    mean_token: bool = Field(
        False, description="images: features are also the mean of all tokens, beside the class token"
    )
    token_spread: bool = Field(
        False,
        description="images: features are also standard deviation and maximum over all tokens, beside the class "
        "token; worth it for early blocks",
    )
    blocks: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        min_length=1,
        description="images: after which blocks of a Vim features are taken, 1 for the first; those of early ones are "
        "less made for the first task's classes. Likelihoods by several blocks are averaged (lda, gda); null: the last",
    )
    mirror: bool = Field(
        False,
        description="images: features are averaged over the image and its mirror image; not where mirrored means "
        "something else, as with digits",
    )
    first_model: bool = Field(
        False,
        description="images: features are also those of the model after the first task, a frozen copy beside the "
        "one that keeps learning; likelihoods of both are averaged (lda, gda)",
    )
    start_model: bool = Field(
        False,
        description="images: features are also those of the model before the first task, such as its pre-trained "
        "weights, in the place of first_model; with frozen+ncm the first-session adaptation of APER",
    )

    @model_validator(mode="after")
    def _distinct(self) -> FittedConfig:
        if self.blocks and len(set(self.blocks)) < len(self.blocks):
            raise ValueError(f"blocks={list(self.blocks)} names one twice")
        return self

    @model_validator(mode="after")
    def _one_copy(self) -> FittedConfig:
        if self.first_model and self.start_model:
            raise ValueError("choose first_model or start_model: one copy of the model is kept")
        return self

    @property
    def asked(self) -> list[str]:
        """The views that are asked for, by their options."""
        return [name for name in FittedConfig.model_fields if getattr(self, name)]

    @property
    def keeps_model(self) -> bool:
        """Whether a copy of the model as it was is one of the views."""
        return self.first_model or self.start_model


class Views(nn.Module):
    """Features of images ``[b, models · blocks · tokens · d]`` for a fitted head.

    ``first`` is the first task's model, or with ``start_model`` the one before it.
    """

    first: nn.Module | None

    def __init__(self, config: FittedConfig) -> None:
        super().__init__()
        self.config = config
        self.first = None

    @classmethod
    def of(cls, config: ComponentConfig) -> Views | None:
        """The views that a head's options ask for; None if it uses the features of the trained classifier."""
        return cls(config) if isinstance(config, FittedConfig) and config.asked else None

    @property
    def parts(self) -> int:
        """Number of parts of the features, all of one width: of every model, the copy first, one of every block."""
        return len(self.config.blocks or (0,)) * (1 + self.config.keeps_model)

    def width(self, features: int) -> int:
        """Width of all features, where the trained classifier is given ``features``."""
        return features * self.parts * (1 + self.config.mean_token + 2 * self.config.token_spread)

    def forward(self, model: Any, x: Tensor) -> Tensor:
        """Features of ``x: [b, c, h, w]`` under the current ``model``, after those of the first task's."""
        models = [self.first, model] if self.config.keeps_model else [model]
        sides = [x.flip(-1), x] if self.config.mirror else [x]  # the image last: states that are recorded are of it
        views = [torch.cat([self._tokens(one, side) for one in models], dim=1) for side in sides]
        return sum(views[1:], start=views[0]) / len(views)

    def _tokens(self, model: Any, x: Tensor) -> Tensor:
        wanted, tokens = self.config.blocks, []
        if wanted is None:
            blocks = [model.forward_features(x)]
        else:
            every = model.forward_blocks(x, max(wanted))
            blocks = [every[block - 1] for block in wanted]
        for features in blocks:
            tokens.append(model.pool(features))
            if self.config.mean_token:
                tokens.append(features.mean(dim=1))
            if self.config.token_spread:
                tokens += [features.std(dim=1, correction=0), features.amax(dim=1)]
        return torch.cat(tokens, dim=1)

    def keep(self, model: nn.Module) -> None:
        """Keep a frozen copy of ``model`` beside the one that learns, if the options ask for one."""
        if self.config.keeps_model:
            self.first = copy.deepcopy(model)
            find_classifier(self.first).replace(nn.Identity())
            self.first.eval().requires_grad_(False)

    def restore(self, model: nn.Module, first: Mapping[str, Tensor] | None) -> None:
        """Restore the first task's model, built like ``model``, from these tensors; none without them."""
        if not first or not self.config.keeps_model:
            self.first = None
            return
        self.keep(model)
        assert self.first is not None
        self.first.load_state_dict(first)


class ViewsClassifier(nn.Module):
    """A fitted head with its views. It stands in the classifier's place and computes features from images itself."""

    def __init__(self, views: Views, fitted: nn.Module) -> None:
        super().__init__()
        self.views = views
        self.fitted = fitted

    def install(self, model: nn.Module) -> None:
        """Let ``model``, in whose classifier's place this module stands, classify with it.

        Bound to the instance, so that no class of models needs to know of views; copies of the model classify alike.
        """
        model.forward = partial(_classify, model, self)

    @staticmethod
    def withdraw(model: nn.Module) -> None:
        """Undo :meth:`install`."""
        vars(model).pop("forward", None)


def _classify(model: nn.Module, classifier: ViewsClassifier, x: Tensor) -> Tensor:
    """Images ``x: [b, c, h, w]`` to logits ``[b, K]``."""
    logits: Tensor = classifier.fitted(classifier.views(model, x))
    return logits


def check_views(config: ComponentConfig, context: Context, head: str) -> None:
    """Refuse views that this kind of data or this model does not have."""
    if not isinstance(config, FittedConfig) or not config.asked:
        return
    asked = config.asked[0]
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
    if config.blocks is None:
        return
    if not isinstance(model, VisionMamba):
        raise ConfigError(f"{head}: blocks is for Vim, whose blocks all have one width, not for {type(model).__name__}")
    if max(config.blocks) > len(model.layers):
        raise ConfigError(f"{head}: blocks={list(config.blocks)}, but the model has {len(model.layers)} blocks")
