"""Trained heads: the classifier that the model came with, and one of directions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ALL_DATA, ComponentConfig, Context, Head
from infssm.methods.core.head import class_count
from infssm.models.features import find_classifier
from infssm.ssm import unwrap


@register_method
class Linear(Head):
    """The model's own classifier, trained with it; the head of a method that names none."""

    name = "linear"
    online = True
    supported_data = ALL_DATA


class CosineClassifier(nn.Module):
    """Scores ``scale · cos(feature, w_c)`` without bias; class weights stand in separately trainable blocks."""

    def __init__(
        self, num_features: int, blocks: Sequence[int], *, scale: float = 1.0, learn_scale: bool = True
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(size, num_features)) for size in blocks)
        self.scale = nn.Parameter(torch.full((1,), scale), requires_grad=learn_scale)
        for block in range(len(blocks)):
            self.reset(block)

    @property
    def in_features(self) -> int:
        """Width of the features."""
        return int(self.weights[0].shape[1])

    @property
    def out_features(self) -> int:
        """Number of classes."""
        return sum(len(block) for block in self.weights)

    @torch.no_grad()
    def reset(self, block: int) -> None:
        """Draw the weights of a block anew, uniform in ``±1/sqrt(features)``."""
        bound = 1 / math.sqrt(self.weights[block].shape[1])
        self.weights[block].uniform_(-bound, bound)

    def train_block(self, block: int) -> None:
        """Give gradients only to one block's weights."""
        for index, weights in enumerate(self.weights):
            weights.requires_grad_(index == block)

    def cosines(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to cosines with all classes, ``[b, K]``."""
        directions = torch.cat([F.normalize(block, dim=1) for block in self.weights])
        return F.linear(F.normalize(features, dim=1), directions)

    def forward(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to scores ``[b, K]``."""
        return self.scale * self.cosines(features)


class CosineConfig(ComponentConfig):
    """Options of :class:`Cosine`."""

    scale: float = Field(10.0, gt=0, description="factor on the cosines; its initial value if it is learned")
    learn_scale: bool = Field(True, description="train the scale with the weights (LUCIR), or keep it")


@register_method
class Cosine(Head):
    """Compares features with one direction per class by angle only, so that no class wins by longer weights.

    Starts from the directions of the model's own classifier, so a model that was trained before keeps its classes.

    Paper: Hou et al., Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019
    """

    name = "cosine"
    Config = CosineConfig

    @classmethod
    @torch.no_grad()
    def prepare(cls, config: CosineConfig, context: Context) -> None:
        """Replace the model's classifier by a cosine classifier."""
        place, like = find_classifier(unwrap(context.module)), next(context.module.parameters())
        own = getattr(place.module, "weight", None)
        classifier = CosineClassifier(
            place.in_features,
            [class_count(context, place, cls.name)],
            scale=config.scale,
            learn_scale=config.learn_scale,
        ).to(like.device, like.dtype)
        weights = classifier.weights[0]
        if isinstance(own, Tensor) and own.shape == weights.shape:
            weights.copy_(torch.where(own.any(dim=1, keepdim=True), F.normalize(own, dim=1), weights))
        place.replace(classifier)
