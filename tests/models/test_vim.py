"""Vim against an independent slow reference, and against the public checkpoint layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.models import VimMixer, create_model
from tests.compare import identical
from tests.models.small import SMALL, scramble

Weights = dict[str, Tensor]


# --- reference: plain functions of a state dict, sequential scan, explicit flips, float64 ---------------------------


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def reference_direction(x: Tensor, z: Tensor, w: Weights, suffix: str, a_log: str) -> Tensor:
    """One direction on a sequence that is already in its own order; x, z: [batch, tokens, inner]."""
    batch, tokens, inner = x.shape
    kernel = w[f"conv1d{suffix}.weight"][:, 0]
    u = torch.zeros_like(x)
    for lag in range(4):
        shifted = torch.cat((x.new_zeros(batch, lag, inner), x[:, : tokens - lag]), dim=1)
        u = u + shifted * kernel[:, 3 - lag]
    u = u + w[f"conv1d{suffix}.bias"]
    u = u * torch.sigmoid(u)
    n = w[a_log].shape[1]
    projected = u @ w[f"x_proj{suffix}.weight"].T
    rank = projected.shape[-1] - 2 * n
    low, b, c = projected[..., :rank], projected[..., rank : rank + n], projected[..., rank + n :]
    delta = torch.log1p(torch.exp(low @ w[f"dt_proj{suffix}.weight"].T + w[f"dt_proj{suffix}.bias"]))
    a = -torch.exp(w[a_log])
    state = x.new_zeros(batch, inner, n)
    outputs = []
    for t in range(tokens):
        step = delta[:, t, :, None]
        state = torch.exp(step * a) * state + step * b[:, t, None, :] * u[:, t, :, None]
        outputs.append((state * c[:, t, None, :]).sum(-1) + w[f"D{suffix}"] * u[:, t])
    y = torch.stack(outputs, dim=1)
    return y * z * torch.sigmoid(z)


def reference_mixer(hidden: Tensor, w: Weights) -> Tensor:
    x, z = (hidden @ w["in_proj.weight"].T).chunk(2, dim=-1)
    forward = reference_direction(x, z, w, "", "A_log")
    backward = reference_direction(x.flip(1), z.flip(1), w, "_b", "A_b_log").flip(1)
    return ((forward + backward) / 2) @ w["out_proj.weight"].T


def reference_vim(images: Tensor, w: Weights, patch: int, depth: int) -> Tensor:
    patches = images.unfold(2, patch, patch).unfold(3, patch, patch)
    batch, _, rows, columns = patches.shape[:4]
    patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(batch, rows * columns, -1)
    tokens = patches @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
    middle = rows * columns // 2
    cls = w["cls_token"].expand(batch, 1, -1)
    tokens = torch.cat((tokens[:, :middle], cls, tokens[:, middle:]), dim=1) + w["pos_embed"]
    residual = torch.zeros_like(tokens)
    hidden = tokens
    for i in range(depth):
        residual = residual + hidden
        prefix = f"layers.{i}.mixer."
        own = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        hidden = reference_mixer(rms_norm(residual, w[f"layers.{i}.norm.weight"]), own)
    features = rms_norm(residual + hidden, w["norm_f.weight"])[:, middle]
    return features @ w["head.weight"].T + w["head.bias"]


@pytest.mark.parametrize("image", [32, (16, 48)])
def test_logits_and_gradients_equal_the_slow_reference(image):
    depth, patch = 3, 8
    model = create_model(
        "vim_nano", img_size=image, patch_size=patch, embed_dim=32, depth=depth, d_state=16, num_classes=6
    )
    scramble(model, 0.1)
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(3, 3, *model.img_size)
    target = torch.tensor([0, 3, 5])
    logits = model(x)
    F.cross_entropy(logits, target).backward()
    expected = reference_vim(x.double(), weights, patch, depth)
    F.cross_entropy(expected, target).backward()
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)
    for name, parameter in model.named_parameters():
        reference = weights[name].grad
        error = (parameter.grad.double() - reference).norm() / reference.norm()
        assert error < 1e-3, f"{name}: {error:.1e}"


def test_a_float64_model_equals_the_reference():
    model = SMALL["vim_nano"].build("vim_nano").double()
    scramble(model)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    # The residual stream is float32 by design, so a float64 model agrees to float32 accuracy of that stream.
    expected = reference_vim(x, dict(model.state_dict()), 8, 2)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


# --- sizes, layout, initialisation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"), [("vim_tiny_patch16_224", 7), ("vim_small_patch16_224", 26), ("vim_base_patch16_224", 98)]
)
def test_published_parameter_counts(name: str, millions: int):
    with torch.device("meta"):
        model = create_model(name)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


# The layout of vim_s_midclstok_80p5acc.pth: name -> shape, per block and outside the blocks.
SMALL_OUTSIDE = {
    "cls_token": (1, 1, 384),
    "pos_embed": (1, 197, 384),
    "patch_embed.proj.weight": (384, 3, 16, 16),
    "patch_embed.proj.bias": (384,),
    "norm_f.weight": (384,),
    "head.weight": (1000, 384),
    "head.bias": (1000,),
}
SMALL_BLOCK = {
    "norm.weight": (384,),
    "mixer.A_log": (768, 16),
    "mixer.D": (768,),
    "mixer.A_b_log": (768, 16),
    "mixer.D_b": (768,),
    "mixer.in_proj.weight": (1536, 384),
    "mixer.conv1d.weight": (768, 1, 4),
    "mixer.conv1d.bias": (768,),
    "mixer.x_proj.weight": (56, 768),
    "mixer.dt_proj.weight": (768, 24),
    "mixer.dt_proj.bias": (768,),
    "mixer.conv1d_b.weight": (768, 1, 4),
    "mixer.conv1d_b.bias": (768,),
    "mixer.x_proj_b.weight": (56, 768),
    "mixer.dt_proj_b.weight": (768, 24),
    "mixer.dt_proj_b.bias": (768,),
    "mixer.out_proj.weight": (384, 768),
}


def public_layout(depth: int = 24) -> dict[str, tuple[int, ...]]:
    blocks = {f"layers.{i}.{name}": shape for i in range(depth) for name, shape in SMALL_BLOCK.items()}
    return SMALL_OUTSIDE | blocks


def test_names_and_shapes_are_those_of_the_public_checkpoint():
    with torch.device("meta"):
        model = create_model("vim_small_patch16_224")
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == public_layout()


def test_a_checkpoint_in_the_public_layout_loads_strictly(tmp_path):
    state = {name: torch.randn(shape) for name, shape in public_layout(depth=2).items()}
    torch.save({"model": state, "epoch": 299}, tmp_path / "vim_s.pth")
    model = create_model("vim_small_patch16_224", depth=2, weights=tmp_path / "vim_s.pth")
    assert all(identical(value, state[name]) for name, value in model.state_dict().items())
    fewer = create_model("vim_small_patch16_224", depth=2, num_classes=20, weights=tmp_path / "vim_s.pth")
    kept = {name: value for name, value in fewer.state_dict().items() if not name.startswith("head.")}
    assert all(identical(value, state[name]) for name, value in kept.items())
    assert fewer.head.weight.abs().max() < 0.2


def test_position_embeddings_resample_to_another_grid(tmp_path):
    model = SMALL["vim_nano"].build("vim_nano")
    model.save_pretrained(tmp_path)
    wider = SMALL["vim_nano"].build("vim_nano", img_size=64, weights=tmp_path)
    assert wider.pos_embed.shape == (1, 65, 32)
    assert identical(wider.pos_embed[0, 32], model.pos_embed[0, 8])
    grid = torch.cat((model.pos_embed[0, :8], model.pos_embed[0, 9:])).T.reshape(1, 32, 4, 4)
    expected = F.interpolate(grid, size=(8, 8), mode="bicubic", align_corners=False)[0].flatten(1).T
    ours = torch.cat((wider.pos_embed[0, :32], wider.pos_embed[0, 33:]))
    torch.testing.assert_close(ours, expected)
    model.set_input_size(64)
    torch.testing.assert_close(model.pos_embed, wider.pos_embed)
    assert model.cls_index == 32
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model(x), wider(x))
    model.save_pretrained(tmp_path / "again")
    assert type(model).from_pretrained(tmp_path / "again").img_size == (64, 64)


def test_wrong_image_sizes_name_the_fix():
    model = SMALL["vim_nano"].build("vim_nano")
    with pytest.raises(ConfigError, match="set_input_size"):
        model(torch.randn(1, 3, 64, 64))
    with pytest.raises(ConfigError, match="multiple"):
        model.set_input_size(33)
    with pytest.raises(ConfigError, match="multiple"):
        create_model("vim_nano", img_size=30)


def test_class_token_sits_in_the_middle_and_prepended_tokens_do_not_move_it():
    model = SMALL["vim_nano"].build("vim_nano")
    scramble(model)
    assert model.cls_index == 8
    tokens = model.embed(torch.zeros(2, 3, 32, 32))
    torch.testing.assert_close(tokens[0, 8], model.cls_token[0, 0] + model.pos_embed[0, 8])
    features = torch.randn(2, 17, 32)
    assert identical(model.pool(features), features[:, 8])
    prompted = torch.cat((torch.randn(2, 5, 32), features), dim=1)
    assert identical(model.pool(prompted), features[:, 8])
    assert model.forward_head(model.encode(torch.cat((torch.randn(2, 5, 32), tokens), dim=1))).shape == (2, 7)


def test_initialisation_as_in_vim():
    model = create_model("vim_nano", depth=9, embed_dim=192)
    mixer = model.layers[4].mixer
    assert isinstance(mixer, VimMixer)
    steps = F.softplus(mixer.dt_proj.bias)
    assert steps.min() >= 0.9e-3
    assert steps.max() <= 0.101
    assert torch.count_nonzero(mixer.dt_proj_b.bias) == 0
    for log in (mixer.A_log, mixer.A_b_log):
        torch.testing.assert_close(log.exp(), torch.arange(1.0, 17).expand(384, 16))
    for weight in (mixer.dt_proj.weight, mixer.dt_proj_b.weight):
        assert weight.abs().max() <= 12**-0.5
        assert weight.std().item() == pytest.approx(12**-0.5 / math.sqrt(3), rel=0.1)
    assert mixer.out_proj.weight.abs().max() <= 1 / math.sqrt(384 * 9)
    assert mixer.out_proj.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 384 * 9), rel=0.05)
    assert mixer.in_proj.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 192), rel=0.05)
    assert model.patch_embed.proj.weight.std().item() == pytest.approx(1.137 / math.sqrt(3 * 4 * 4), rel=0.03)
    assert torch.count_nonzero(model.patch_embed.proj.bias) == 0
    for parameter in (model.pos_embed, model.head.weight):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
    for d in (mixer.D, mixer.D_b, model.norm_f.weight, model.layers[0].norm.weight):
        assert identical(d, torch.ones_like(d))


def test_sizes_of_the_parameter_sets_for_vim_small():
    with torch.device("meta"):
        model = create_model("vim_small_patch16_224")

    def size(which: str) -> int:
        rows = [row for layer in model.layers for row in layer.mixer.state_parameters(which)]
        return sum((p if r is None else p[r]).numel() for p, r in rows)

    assert size("AC-direct") == 2_985_984
    assert size("ABC-direct") == 3_575_808
    assert size("ABC-full") == 3_575_808 + 184_320 + 7_077_888


def test_autocast_keeps_the_residual_stream_in_float32():
    model = SMALL["vim_nano"].build("vim_nano")
    scramble(model, 0.05)
    x = torch.randn(2, 3, 32, 32)
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        hidden, residual = model.layers[0](model.embed(x), None)
    assert residual.dtype == torch.float32
    torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.05)
    logits.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert hidden.dtype == torch.bfloat16
