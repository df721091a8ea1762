"""One way to a model's features and classifier, for our models and for others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models import create_model, find_classifier
from infssm.models.features import TRAINED, Classifier, features, plain_weights, require, training_weights
from tests.methods import toys


@pytest.mark.parametrize("name", toys.MODELS)
def test_features_of_our_models_are_their_pooled_features(name: str) -> None:
    model, x = toys.model(name).eval(), toys.inputs(name)
    found = features(model, x)
    torch.testing.assert_close(found, model.pool(model.forward_features(x)), rtol=0, atol=0)
    place = find_classifier(model)
    assert (place.owner, place.name, place.in_features) == (model, "head", found.shape[1])
    torch.testing.assert_close(place.module(found), model(x), rtol=0, atol=0)


class Named(nn.Module):
    """A model with its classifier under one of the usual names, as transformers and torchvision have it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.body = nn.Linear(3, 5)
        setattr(self, name, nn.Linear(5, 2))
        self.name = name

    def forward(self, pixel_values: Tensor, scale: float = 1.0) -> Tensor:
        logits: Tensor = getattr(self, self.name)(scale * self.body(pixel_values))
        return logits


@pytest.mark.parametrize("name", ["head", "classifier", "score", "fc"])
def test_usual_names_and_keyword_inputs(name: str) -> None:
    model, x = Named(name), torch.randn(4, 3)
    assert find_classifier(model) == Classifier(model, name)
    assert torch.equal(features(model, {"pixel_values": x, "scale": 2.0}), 2 * model.body(x))
    assert torch.equal(features(model, x, scale=2.0), 2 * model.body(x))


class Deep(nn.Module):
    """timm's larger heads hold the classifier inside."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))

    def get_classifier(self) -> nn.Module:
        return self.head[1]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


def test_a_classifier_deep_inside_can_be_replaced_and_copied() -> None:
    model, x = Deep(), torch.randn(4, 3)
    place = find_classifier(model)
    assert place == Classifier(model.head, "1")
    place.replace(nn.Linear(5, 7))
    assert model(x).shape == (4, 7)
    assert find_classifier(model).module.out_features == 7
    twin, twins_place = copy.deepcopy((model, place))
    assert twins_place.module is twin.head[1]


def test_timm_models() -> None:
    from infssm._torchvision import timm

    model = timm().create_model("resnet10t", num_classes=3).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(x), pre_logits=True)
        torch.testing.assert_close(features(model, x), expected)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), create_model("vim_nano", num_classes=0)])
def test_a_model_without_a_classifier(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"has no classifier layer: .*get_classifier\(\)"):
        find_classifier(model)


def test_a_language_model_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="LanguageModel is a language model: its lm_head scores the vocabulary"):
        find_classifier(create_model("mamba_lm_130m", d_model=16, n_layer=1, vocab_size=20))


def test_features_must_be_vectors() -> None:
    with pytest.raises(ConfigError, match=r"one feature vector per sample, \[b, d\]; got \(2, 4, 5\)"):
        features(Named("score"), torch.randn(2, 4, 3))


def test_the_classifier_itself_does_not_run_and_nothing_stays_on_it() -> None:
    model, calls = Named("head"), []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    features(model, torch.randn(2, 3))
    assert calls == []
    assert model(torch.randn(2, 3)).shape == (2, 2)
    assert calls == [1]
    model.forward = lambda x: model.body(x)
    with pytest.raises(ConfigError, match="does not call its classifier"):
        features(model, torch.randn(2, 3))
    assert not model.head._forward_pre_hooks


def test_what_a_method_asks_for_is_named() -> None:
    with pytest.raises(ConfigError, match="l2p-r works on embed, head of the model, and Deep has no embed"):
        require(Deep(), "l2p-r", "embed", "head")


def test_weights_with_a_fitted_head_give_the_one_that_is_asked_for() -> None:
    model = Named("fc")
    plain = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    assert training_weights(model, plain) == plain_weights(model, plain) == plain
    trained = {f"{TRAINED}weight": torch.ones(2, 5), f"{TRAINED}bias": torch.ones(2)}
    body = {key: value for key, value in plain.items() if key.startswith("body.")}
    as_trained = body | {"fc.weight": trained[f"{TRAINED}weight"], "fc.bias": trained[f"{TRAINED}bias"]}
    assert training_weights(model, plain | trained) == as_trained
    assert plain_weights(model, plain | trained) == plain
    other = body | {"fc.means": torch.ones(2, 5)}
    assert training_weights(model, other | trained) == plain_weights(model, other | trained) == as_trained
