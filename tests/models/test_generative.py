"""Generative classifiers: probabilities that add up to one, samples that follow them, values as they should be."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models import GenerativeClassifier, create_model
from infssm.models.features import features
from tests.models.small import scramble

NAMES = ["mamba_generative_nano", "mamba2_generative_nano"]
TINY: dict[str, dict[str, Any]] = {
    "mamba_generative_nano": {"d_model": 16, "n_layer": 2, "d_state": 4},
    "mamba2_generative_nano": {"d_model": 16, "n_layer": 2, "d_state": 4, "headdim": 8},
}


def tiny(name: str = NAMES[0], **options: Any) -> GenerativeClassifier:
    torch.manual_seed(0)
    made = create_model(name, **{**TINY[name], "num_classes": 3, "side": 2, "levels": 3, **options}).double()
    scramble(made, 0.3)
    return made  # type: ignore[no-any-return]


def all_samples(levels: int, tokens: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(levels), repeat=tokens)), dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_the_probabilities_of_all_samples_of_a_class_add_up_to_one(name: str) -> None:
    """Only a causal model has this property: a token that saw itself or a later one would break it."""
    model = tiny(name)
    with torch.no_grad():
        logits = model.head(all_samples(3, 4))
    assert logits.shape == (81, 3)
    torch.testing.assert_close(logits.exp().sum(0), torch.ones(3, dtype=torch.float64), rtol=1e-9, atol=0)
    assert (logits.softmax(1).std(0) > 1e-3).all()  # classes differ, and samples do


@torch.no_grad()
def test_a_likelihood_is_that_of_the_recurrence_token_by_token() -> None:
    """The recurrent step in the place of the scan, and the inputs put together by hand."""
    model = tiny(side=3)
    head, encoder = model.head, model.backbone
    values = torch.randint(3, (2, 9), generator=torch.Generator().manual_seed(1))
    for row, label in itertools.product(range(2), range(3)):
        states, total = encoder.initial_state(1), 0.0
        for token, level in enumerate(values[row].tolist()):
            vector = encoder.embedding.weight[token].clone()
            vector += head.start[label, 0] if token == 0 else head.previous[label, values[row, token - 1]]
            out, states = encoder.advance(vector[None, None], states)
            scores = [float(out[0, 0] @ head.output[label, candidate]) for candidate in range(3)]
            total += scores[level] - math.log(sum(map(math.exp, scores)))
        assert float(head(values.double())[row, label]) == pytest.approx(total, rel=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_what_is_generated_follows_the_probabilities(name: str) -> None:
    model, count = tiny(name), 4000
    samples = all_samples(3, 4)
    with torch.no_grad():
        expected = model.head(samples).exp()
    place = 3 ** torch.arange(3, -1, -1)
    for label in range(3):
        drawn = model.head.generate(torch.full((count,), label), torch.Generator().manual_seed(label))
        assert drawn.shape == (count, 4)
        share = torch.bincount(drawn @ place, minlength=81) / count
        # Five standard deviations of a binomial share, and one sample more for the rarest.
        bound = 5 * (expected[:, label] / count).sqrt() + 1 / count
        assert ((share - expected[:, label]).abs() <= bound).all()
    again = model.head.generate(torch.zeros(5, dtype=torch.long), torch.Generator().manual_seed(0))
    assert torch.equal(again, model.head.generate(torch.zeros(5, dtype=torch.long), torch.Generator().manual_seed(0)))


def test_images_become_rounded_means_pixel_by_pixel() -> None:
    model = tiny(in_chans=2, side=2, levels=5)
    x = torch.rand(3, 2, 4, 4, dtype=torch.float64)
    model.fit_range([(x[:2], None), (x[2:], None)])
    means = x.numpy().reshape(3, 2, 2, 2, 2, 2).mean(axis=(3, 5)).transpose(0, 2, 3, 1).reshape(3, 8)
    expected = np.rint((means - means.min()) / (means.max() - means.min()) * 4)
    assert torch.equal(features(model, x), torch.from_numpy(expected))
    assert model.embed(9 + x).unique().tolist() == [4]  # beyond the range: the last level


def test_series_are_stretched_without_their_padding() -> None:
    model = tiny(in_dim=3, side=4, levels=5)
    x = torch.rand(2, 8, 3, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([[8], [4]])
    assert model.num_features == 12
    assert torch.equal(model.embed(x, mask)[0], model.embed(x[:1])[0])
    assert torch.equal(model.embed(x, mask)[1], model.embed(x[1:, :4])[0])
    torch.testing.assert_close(model.pooled(x)[0], x[0].view(4, 2, 3).mean(1).flatten())
    torch.testing.assert_close(model.pooled(x, mask)[1], x[1, :4].flatten())
    torch.testing.assert_close(model(x, mask)[1], model(x[1:, :4])[0])


def test_a_class_more_leaves_the_others_as_they_are() -> None:
    model, x = tiny(), torch.rand(2, 1, 4, 4, dtype=torch.float64)
    more = tiny(num_classes=5)
    rows = {name for name in model.state_dict() if name.startswith("head.")}
    assert rows == {"head.start", "head.previous", "head.output"}
    with torch.no_grad():
        for name, tensor in more.state_dict().items():
            tensor[: len(model.state_dict()[name])].copy_(model.state_dict()[name]) if name in rows else (
                tensor.copy_(model.state_dict()[name])
            )
    torch.testing.assert_close(more(x)[:, :3], model(x))


def test_a_token_has_two_values_at_least() -> None:
    with pytest.raises(ConfigError, match="levels=1"):
        create_model(NAMES[0], levels=1)


def test_the_mixers_stay_when_the_classes_are_initialised_again() -> None:
    model = tiny()
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    model.reset_classifier(2)
    assert model.num_classes == 2
    assert model(torch.rand(3, 1, 4, 4, dtype=torch.float64)).shape == (3, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())
    model.reset_classifier(0)
    assert isinstance(model.head, nn.Identity)
