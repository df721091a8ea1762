"""The convolutional stem of Vim: what it computes, which shapes it takes, and that saved models come back with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.models import create_model, from_pretrained
from tests.models.small import scramble

OPTIONS = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "d_state": 4, "num_classes": 5, "stem": "conv"}


def reference(images: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two convolutions of stride 2, each normalised over its image, SiLU, and a projection of every pixel."""
    x = images
    for i in (0, 3):
        x = F.conv2d(x, state[f"layers.{i}.weight"], state[f"layers.{i}.bias"], stride=2, padding=1)
        mean, variance = x.mean((1, 2, 3), keepdim=True), x.var((1, 2, 3), keepdim=True, correction=0)
        scale, shift = (state[f"layers.{i + 1}.{name}"][:, None, None] for name in ("weight", "bias"))
        x = (x - mean) / torch.sqrt(variance + 1e-5) * scale + shift
        x = x * torch.sigmoid(x)
    x = torch.einsum("bchw,dc->bhwd", x, state["layers.6.weight"][:, :, 0, 0]) + state["layers.6.bias"]
    return x.flatten(1, 2)


def test_the_stem_is_its_reference_and_its_tokens_run_row_by_row():
    model = create_model("vim_nano", **OPTIONS).double()
    scramble(model)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = model.patch_embed(images)
    assert tokens.shape == (2, 16, 16)
    torch.testing.assert_close(tokens, reference(images, model.patch_embed.state_dict()), rtol=1e-10, atol=1e-10)
    assert model(images).shape == (2, 5)


def test_no_image_moves_the_tokens_of_another():
    model = create_model("vim_nano", **OPTIONS).double()
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-12, atol=1e-12)


def test_a_saved_model_comes_back_with_its_stem(tmp_path):
    model = create_model("vim_nano", **OPTIONS)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("wrong", [{"patch_size": 1}, {"img_size": 18, "patch_size": 6}, {"embed_dim": 9}])
def test_sizes_that_cannot_be_halved_are_refused(wrong):
    with pytest.raises(ConfigError, match="stem='patch'"):
        create_model("vim_nano", **{**OPTIONS, **wrong})


def test_an_unknown_stem_is_refused():
    with pytest.raises(ConfigError, match="'patch' or 'conv'"):
        create_model("vim_nano", **{**OPTIONS, "stem": "pixels"})
