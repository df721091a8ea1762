"""Manners every registered model must have."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import infssm.models as models
from infssm.errors import CheckpointError, ConfigError
from infssm.models import Backbone, create_model, from_pretrained, list_models, register_model
from infssm.models.block import drop_path
from infssm.models.registry import MODELS
from tests.compare import assert_rounding, identical
from tests.models.small import KINDS, SMALL, scramble

NAMES = list_models()


def test_every_registered_model_has_a_small_configuration():
    assert sorted(SMALL) == NAMES
    assert list_models("vim*") == [name for name in NAMES if name.startswith("vim")]


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_head_of_pooled_features_of_embedded_tokens(name: str):
    small = SMALL[name]
    model = small.build(name).eval()
    scramble(model, 0.05)
    x = small.make_input()
    logits = model(x)
    assert logits.shape[0] == 2
    assert logits.shape[-1] == small.classes == model.num_classes
    features = model.forward_features(x)
    assert features.shape[0] == 2
    assert features.shape[-1] == model.num_features
    torch.testing.assert_close(features, model.encode(model.embed(x)))
    torch.testing.assert_close(model.forward_head(features), logits)
    torch.testing.assert_close(model.head(model.pool(features)), logits)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), model.pool(features))
    assert model.get_classifier() is model.head


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name: str):
    small = SMALL[name]
    model = small.build(name)
    scramble(model, 0.05)
    model(small.make_input()).square().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


@pytest.mark.parametrize("name", [name for name in NAMES if "_lm_" not in name and "_generative_" not in name])
def test_reset_classifier_replaces_the_head_alone(name: str):
    small = SMALL[name]
    model = small.build(name).double()
    before = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith("head.")}
    model.reset_classifier(3)
    assert model.num_classes == 3
    assert model.head.weight.shape == (3, model.num_features)
    assert model.head.weight.dtype == torch.float64
    assert torch.count_nonzero(model.head.bias) == 0
    after = model.state_dict()
    assert all(identical(after[key], value) for key, value in before.items())
    model.reset_classifier(0)
    assert isinstance(model.head, nn.Identity)


@pytest.mark.parametrize("name", NAMES)
def test_no_weight_decay_names_parameters_of_more_than_one_dimension(name: str):
    model = SMALL[name].build(name)
    parameters = dict(model.named_parameters())
    assert model.no_weight_decay() <= parameters.keys()
    if name.startswith("vim"):
        assert model.no_weight_decay() == {"pos_embed", "cls_token"}


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_give_the_same_model(name: str, tmp_path):
    small = SMALL[name]
    model = small.build(name).eval()
    scramble(model, 0.05)
    if "_lm_" not in name:
        model.reset_classifier(5)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["name"] == name
    again = from_pretrained(tmp_path).eval()
    x = small.make_input()
    assert identical(again(x), model(x))
    assert type(again).from_pretrained(tmp_path).num_classes == again.num_classes
    if "_lm_" not in name:
        other_head = from_pretrained(tmp_path, num_classes=11)
        assert other_head.num_classes == 11
        assert_rounding(other_head.forward_features(x), again.forward_features(x))


def test_from_pretrained_of_another_class_or_an_empty_folder(tmp_path):
    small = SMALL["s4d_nano"]
    with pytest.raises(CheckpointError, match=r"config\.json"):
        from_pretrained(tmp_path)
    small.build("s4d_nano").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="S4DModel, not a VisionMamba"):
        models.VisionMamba.from_pretrained(tmp_path)


def test_only_registered_models_save():
    with pytest.raises(ConfigError, match="create_model"):
        models.S4DModel(d_model=8, n_layer=1, d_state=4).save_pretrained("unused")


def test_language_models_keep_output_and_embedding_tied(tmp_path):
    small = SMALL["mamba_lm_130m"]
    model = small.build("mamba_lm_130m")
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert again.lm_head.weight is again.backbone.embedding.weight
    assert small.build("mamba_lm_130m")(small.make_input()).shape == (2, 9, 50)
    with pytest.raises(ConfigError, match="vocab_size"):
        model.reset_classifier(3)
    classifier = create_model("mamba_130m", weights=tmp_path, **small.options, num_classes=4)
    torch.testing.assert_close(classifier.backbone.norm_f.weight, model.backbone.norm_f.weight)
    assert identical(classifier.backbone.layers[1].mixer.x_proj.weight, model.backbone.layers[1].mixer.x_proj.weight)


def test_unknown_names_and_options():
    with pytest.raises(ConfigError, match="did you mean 'vim_nano'"):
        create_model("vim_nan")
    with pytest.raises(ConfigError, match=r"vim_nano.*colour"):
        create_model("vim_nano", colour="red")
    with pytest.raises(ConfigError, match="pooling"):
        create_model("mamba_nano", pooling="max")
    with pytest.raises(ConfigError, match="heads"):
        create_model("mamba2_nano", headdim=7)
    with pytest.raises(ConfigError, match="discretization"):
        create_model("s4d_nano", discretization="euler")


def test_register_model_adds_to_the_list():
    class Unfinished(Backbone):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.num_features, self.num_classes = 4, num_classes
            self.head = self.make_head(num_classes)

    class Own(Unfinished):
        def embed(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def encode(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens

        def pool(self, features: torch.Tensor) -> torch.Tensor:
            return features.mean(1)

    try:
        register_model("own_model_of_this_test")(Unfinished)
        assert "own_model_of_this_test" in list_models()
        with pytest.raises(ConfigError, match="embed"):
            create_model("own_model_of_this_test", num_classes=2)
        del MODELS._items["own_model_of_this_test"]
        register_model("own_model_of_this_test")(Own)
        assert create_model("own_model_of_this_test", num_classes=2)(torch.ones(3, 5, 4)).shape == (3, 2)
    finally:
        del MODELS._items["own_model_of_this_test"]


def test_timm_builds_our_models():
    from infssm._torchvision import timm
    from infssm.integrations.timm import register

    registered = timm().list_models()
    first = register()
    assert set(first) >= set(NAMES) - set(registered)
    assert register() == []
    small = SMALL["vim_nano"]
    model = timm().create_model("vim_nano", **small.options)
    assert isinstance(model, models.VisionMamba)
    assert model(small.make_input()).shape == (2, 7)
    with pytest.raises(ConfigError, match="weights=path"):
        timm().create_model("vim_nano", pretrained=True)


@pytest.mark.parametrize("name", KINDS)
def test_stochastic_modes_agree_without_dropout(name: str):
    small = SMALL[name]
    model = small.build(name)
    x = small.make_input()
    torch.testing.assert_close(model.train()(x), model.eval()(x))


def test_drop_path_drops_whole_samples_and_rescales_the_rest():
    x = torch.rand(400, 3, 5) + 1
    out = drop_path(x, 0.25, training=True)
    kept = out.flatten(1).abs().sum(1) > 0
    torch.testing.assert_close(out[kept], x[kept] / 0.75)
    assert 0.65 < kept.float().mean() < 0.85
    assert drop_path(x, 0.25, training=False) is x
    small = SMALL["vim_nano"]
    model = small.build("vim_nano", drop_path_rate=0.5, depth=3)
    x = small.make_input()[:1].expand(16, -1, -1, -1)
    torch.testing.assert_close(model.eval()(x)[0], model(x)[1])
    spread = model.train()(x).detach().std(0)
    assert (spread > 1e-4).all()


@pytest.mark.parametrize("name", KINDS)
def test_models_run_in_bfloat16_and_under_autocast(name: str):
    small = SMALL[name]
    model = small.build(name)
    scramble(model, 0.02)
    x = small.make_input()
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(x)
    mixed.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    narrow = model.bfloat16()(x.bfloat16() if x.is_floating_point() else x)
    for logits in (mixed, narrow):
        torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", KINDS)
def test_float64_models_agree_with_float32_ones(name: str):
    small = SMALL[name]
    model = small.build(name)
    scramble(model, 0.05)
    x = small.make_input()
    single = model(x)
    double = model.double()(x.double() if x.is_floating_point() else x)
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)
