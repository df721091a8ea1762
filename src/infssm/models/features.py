"""Features and classifier of any model, by one rule: features are what its classifier layer is given.

A classifier is what ``get_classifier()`` returns (timm's convention, and ours), else the layer named ``head``,
``classifier``, ``score`` or ``fc``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infssm._batch import run_model
from infssm.errors import ConfigError

_NAMES = ("head", "classifier", "score", "fc")

TRAINED = "trained_classifier."
"""Before names of tensors of the classifier in training, in weights saved while a fitted head stood in its place."""


@dataclass(frozen=True)
class Classifier:
    """The place of a model's classifier: the layer ``name`` of ``owner``, whichever module stands there."""

    owner: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """The module that stands there now."""
        module = getattr(self.owner, self.name)
        assert isinstance(module, nn.Module)
        return module

    def replace(self, module: nn.Module) -> None:
        """Put another module there: features ``[b, d]`` to logits ``[b, K]``."""
        setattr(self.owner, self.name, module)

    @property
    def in_features(self) -> int:
        """Width d of the features."""
        width = getattr(self.module, "in_features", None)
        width = getattr(self.owner, "num_features", None) if width is None else width
        if not isinstance(width, int):
            raise ConfigError(
                f"how wide are the features? The classifier {self.name!r} ({type(self.module).__name__}) has no "
                "in_features and its model no num_features"
            )
        return width


def find_classifier(model: nn.Module) -> Classifier:
    """Where the classifier of a model is (without wrappers such as DDP)."""
    if isinstance(getattr(model, "lm_head", None), nn.Module):
        raise ConfigError(
            f"{type(model).__name__} is a language model: its lm_head scores the vocabulary at every token, there is "
            "no classifier of classes to replace or to fit"
        )
    get = getattr(model, "get_classifier", None)
    found = get() if callable(get) else next((m for n in _NAMES if (m := getattr(model, n, None)) is not None), None)
    if not isinstance(found, nn.Module) or isinstance(found, nn.Identity):
        raise ConfigError(
            f"{type(model).__name__} has no classifier layer: a model says which one it is by get_classifier(), or "
            f"names it {', '.join(_NAMES[:-1])} or {_NAMES[-1]}, and has one class or more"
        )
    path = next(name for name, module in model.named_modules() if module is found)
    owner, _, name = path.rpartition(".")
    return Classifier(model.get_submodule(owner), name)


def output_layer(model: nn.Module) -> nn.Module:
    """The layer whose input are the features: the classifier, of a language model its output layer."""
    output = getattr(model, "lm_head", None)
    return output if isinstance(output, nn.Module) else find_classifier(model).module


def train_only(model: nn.Module, parameters: Iterable[Tensor] = ()) -> None:
    """Give gradients only to the output layer and to these ``parameters``."""
    model.requires_grad_(False)
    output_layer(model).requires_grad_(True)
    for parameter in parameters:
        parameter.requires_grad_(True)


class _Reached(BaseException):
    """Ends a forward at the classifier; not an Exception, so that no handler inside a model swallows it."""

    def __init__(self, features: Tensor) -> None:
        self.features = features


def features(model: nn.Module, x: Tensor | Mapping[str, Any], **kwargs: Any) -> Tensor:
    """Features ``[b, d]`` of ``x: [b, ...]``: what the classifier is given, which does not run itself.

    Of a language model what its output layer is given, ``[b, tokens, d]``. A mapping stands for ``model(**x)``.
    """

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise _Reached(args[0])

    handle = output_layer(model).register_forward_pre_hook(stop)
    try:
        run_model(model, x, **kwargs)
    except _Reached as reached:
        found = reached.features
    else:
        raise ConfigError(f"the forward of {type(model).__name__} does not call its classifier")
    finally:
        handle.remove()
    if found.ndim != 2 and not isinstance(getattr(model, "lm_head", None), nn.Module):
        raise ConfigError(
            f"the classifier of {type(model).__name__} must be given one feature vector per sample, [b, d]; got "
            f"{tuple(found.shape)}"
        )
    return found


def require(model: nn.Module, method: str, *names: str) -> None:
    """Raise for a model without the attributes that a method works with."""
    missing = [name for name in names if not hasattr(model, name)]
    if missing:
        raise ConfigError(
            f"{method} works on {', '.join(names)} of the model, and {type(model).__name__} has no "
            f"{', '.join(missing)}: use a backbone of infssm.list_models()"
        )


def classifier_prefix(module: nn.Module, model: nn.Module) -> str:
    """Prefix of the classifier's tensors of ``model`` in the state dict of ``module``, its wrapper."""
    classifier = find_classifier(model).module
    path: str = next(name for name, child in module.named_modules() if child is classifier)
    return f"{path}."


def trained_classifier(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the classifier in training; none where no fitted head was saved."""
    return {name.removeprefix(TRAINED): value for name, value in weights.items() if name.startswith(TRAINED)}


def training_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Saved weights with the trained classifier instead of a fitted head."""
    trained = trained_classifier(weights)
    if not trained:
        return dict(weights)
    prefix = classifier_prefix(model, model)
    rest = {name: value for name, value in weights.items() if not name.startswith((TRAINED, prefix))}
    return rest | {prefix + name: value for name, value in trained.items()}


def plain_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Saved weights with a fitted head where it is a layer like the model's own, else with the one in training."""
    if not trained_classifier(weights):
        return dict(weights)
    prefix = classifier_prefix(model, model)
    own = {name for name in model.state_dict() if name.startswith(prefix)}
    if own != {name for name in weights if name.startswith(prefix)}:
        return training_weights(model, weights)
    return {name: value for name, value in weights.items() if not name.startswith(TRAINED)}


def with_rows_of(weights: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Weights of a model with another number of classes, for ``model``: its rows complete the classifier's or end it.

    Only tensors of layers that bear the classifier's name are changed, so that weights of another architecture are
    still refused.
    """
    if isinstance(getattr(model, "lm_head", None), nn.Module):
        return dict(weights)
    own, fitting, place = model.state_dict(), dict(weights), f".{find_classifier(model).name}."
    for name, value in weights.items():
        like = own.get(name)
        if like is not None and place in f".{name}" and value.ndim and value.shape[1:] == like.shape[1:]:
            fitting[name] = torch.cat([value, like[len(value) :].to(value)])[: len(like)]
    return fitting
