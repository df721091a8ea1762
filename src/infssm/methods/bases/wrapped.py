"""A backbone inside a module that changes what its classifier is given, open to every head like a bare one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from infssm.models.features import find_classifier, require


class WrappedBackbone(nn.Module):
    """What CLFD's and L2P's modules share: the steps of the backbone and the place of its classifier.

    Subclasses compute features their own way and give them to :meth:`classify`. By the rule of
    :mod:`infssm.models.features` these are the features that heads are fitted to, and a head that stands in the
    classifier's place makes the logits of them.
    """

    def __init__(self, model: nn.Module, method: str, *also: str) -> None:
        super().__init__()
        require(model, method, "embed", "encode", "pool", *also)
        self._classifier = find_classifier(model)
        self.model: Any = model

    @property
    def num_features(self) -> int:
        """Width d of the features."""
        return self._classifier.in_features

    def classify(self, features: Tensor) -> Tensor:
        """``features: [b, d]`` to logits ``[b, K]`` by whichever classifier stands in the backbone."""
        logits: Tensor = self._classifier.module(features)
        return logits

    def get_classifier(self) -> nn.Module:
        """The backbone's classifier."""
        return self._classifier.module


def pooled_features(model: Any, x: Tensor) -> Tensor:
    """Features ``[b, d]`` as a bare backbone gives them to its classifier, of ``x: [b, ...]``."""
    pooled: Tensor = model.pool(model.encode(model.embed(x)))
    return pooled
