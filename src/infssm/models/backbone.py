"""Base of all backbones: heads, features, weights on disk, and their creation."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infssm.errors import CheckpointError, ConfigError
from infssm.models.block import linear_
from infssm.models.mixer import SequenceState
from infssm.models.pretrained import load_weights
from infssm.models.registry import build


class Backbone(nn.Module, ABC):
    """A feature extractor with a linear ``head``.

    Subclasses set ``num_features`` and ``num_classes`` and define ``embed`` (input -> tokens [batch, tokens, dim]),
    ``encode`` (tokens -> features [batch, tokens, dim]) and ``pool`` (features -> [batch, dim]).
    """

    num_features: int
    num_classes: int
    head: nn.Module
    cls_index: int | None = None
    supported_data: ClassVar[frozenset[str]] = frozenset({"images"})
    """Kinds of data it is for: ``images``, ``series``, ``tokens`` with classes, ``language``, ``regression``."""
    head_kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.Identity)
    """Modules that :meth:`make_head` makes, so that a model with one of them can be saved and built again."""
    model_name: str | None = None
    model_options: dict[str, Any]

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Turn the input into tokens [batch, tokens, dim]."""

    @abstractmethod
    def encode(self, tokens: Tensor) -> Tensor:
        """Run all blocks and the final norm: tokens -> features [batch, tokens, dim]."""

    @abstractmethod
    def pool(self, features: Tensor) -> Tensor:
        """Reduce features [batch, tokens, dim] to what the head sees, [batch, dim]."""

    def forward_features(self, x: Tensor) -> Tensor:
        """Features of every token, [batch, tokens, dim]."""
        return self.encode(self.embed(x))

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Logits [batch, classes] of features [batch, tokens, dim]; with ``pre_logits`` the pooled features."""
        pooled = self.pool(features)
        if pre_logits:
            return pooled
        logits: Tensor = self.head(pooled)
        return logits

    def forward(self, x: Tensor, *, state: Any = None, return_state: bool = False) -> Any:
        """Logits [batch, classes]. ``state``, ``return_state``: of causal models, see ``CausalBackbone``."""
        if state is not None or return_state:
            self.initial_state(len(x))  # raises, since only causal models have one
        return self.forward_head(self.forward_features(x))

    def initial_state(self, batch: int) -> SequenceState:  # noqa: ARG002
        """The state before the first token; only for causal models."""
        raise ConfigError(
            f"{type(self).__name__} scans in both directions: the output for a token depends on all later tokens, so "
            "no state can carry it from chunk to chunk. Causal models can: Mamba, Mamba-2, S4D"
        )

    def make_head(self, num_classes: int) -> nn.Module:
        """Return a freshly initialised classifier (identity for zero classes)."""
        if num_classes == 0:
            return nn.Identity()
        head = nn.Linear(self.num_features, num_classes)
        linear_(head)
        return head

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the head by a fresh one for ``num_classes`` classes, on the device of the model."""
        parameter = next(self.parameters())
        self.head = self.make_head(num_classes).to(device=parameter.device, dtype=parameter.dtype)
        self.num_classes = num_classes

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay must leave alone, besides all one-dimensional ones."""
        return set()

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the state dict of a public checkpoint of this architecture: names, and shapes where they differ."""
        return state

    def head_shape_differs(self, state: dict[str, Tensor]) -> bool:
        """Whether a state dict has a head for another number of classes (or none), so ours stays as it is."""
        weight = self.head.weight if isinstance(self.head, nn.Linear) else None
        other = state.get("head.weight")
        if weight is None or other is None:
            return True
        return other.ndim == 2 and other.shape[1] == weight.shape[1] and other.shape[0] != weight.shape[0]

    def saved_options(self) -> dict[str, Any]:
        """Options from which ``create_model`` rebuilds this model."""
        return {**self.model_options, "num_classes": self.num_classes}

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write ``model.safetensors`` and ``config.json`` (name and options for ``create_model``)."""
        if self.model_name is None:
            raise ConfigError("only models built by create_model can be saved: it notes their name and options")
        head = getattr(self, "head", None)  # language models have none
        if head is not None and not isinstance(head, self.head_kinds):
            raise ConfigError(
                f"a {type(head).__name__} stands in the classifier's place, which from_pretrained cannot build: save "
                "the run (infssm.learner.hub.HubClassifier), or put the trained classifier back first "
                "(method.head.withdraw())"
            )
        folder = Path(directory).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps({"name": self.model_name, "options": self.saved_options()}, indent=2)
        (folder / "config.json").write_text(config + "\n")
        state = self.state_dict()
        # Tensors that share memory are stored under their first name; `adapt_state_dict` restores the others.
        first = {tensor.data_ptr(): name for name, tensor in reversed(list(state.items()))}
        tensors = {name: state[name].detach().cpu().contiguous() for name in first.values()}
        save_file(tensors, folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], **options: Any) -> Backbone:
        """Rebuild a model from what ``save_pretrained`` wrote; ``options`` override the saved ones."""
        model = from_pretrained(directory, **options)
        if not isinstance(model, cls):
            raise CheckpointError(f"{directory} holds a {type(model).__name__}, not a {cls.__name__}")
        return model


def create_model(
    name: str, *, num_classes: int | None = None, weights: str | os.PathLike[str] | None = None, **options: Any
) -> Any:
    """Build a registered model.

    name: one of ``list_models()``. num_classes: size of the head (the model's default when ``None``).
    weights: a checkpoint file, a folder written by ``save_pretrained``, or the name of a file in
    ``$INFSSM_WEIGHTS``; a head for another number of classes is left out. options: see the model's function.
    """
    if num_classes is not None:
        options["num_classes"] = num_classes
    model = build(name, options)
    if weights is not None:
        if not isinstance(model, Backbone):
            raise ConfigError(f"model {name!r} is not a Backbone: load its weights yourself")
        load_weights(model, weights)
    return model


@cache
def kinds_of_model(name: str) -> frozenset[str]:
    """Kinds of data a registered model is for, see ``Backbone.supported_data``; images where it does not say."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = build(name, {})
    found: frozenset[str] = getattr(model, "supported_data", Backbone.supported_data)
    return found


def from_pretrained(directory: str | os.PathLike[str], **options: Any) -> Any:
    """Rebuild a model from a folder written by ``save_pretrained``; ``options`` override the saved ones."""
    folder = Path(directory).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
        name, saved = config["name"], config["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} has no usable config.json; was it written by save_pretrained?") from error
    return create_model(name, weights=folder, **{**saved, **options})
