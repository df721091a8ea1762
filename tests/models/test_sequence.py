"""Mamba and Mamba-2 against transformers' own slow paths, with copied weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import infssm.ops.ssd
from infssm._torchvision import torchvision
from infssm.errors import CheckpointError
from infssm.models import create_model
from tests.models.small import scramble

VOCAB, TOKENS = 50, 11


def transformers_model(prefix: str, **options: Any):
    torchvision()
    import transformers

    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, conv_kernel=4, expand=2, pad_token_id=0, **options
    )
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    scramble(model, 0.1)
    return model


def mamba_pair():
    theirs = transformers_model("Mamba", state_size=8, time_step_rank=2, use_mambapy=False, residual_in_fp32=True)
    return theirs, {"name": "mamba_lm_130m", "d_state": 8}


def mamba2_pair(groups: int):
    theirs = transformers_model(
        "Mamba2", state_size=8, num_heads=4, head_dim=16, n_groups=groups, chunk_size=4, residual_in_fp32=True
    )
    return theirs, {"name": "mamba2_lm_130m", "d_state": 8, "headdim": 16, "ngroups": groups}


def load(options: dict[str, Any], theirs: torch.nn.Module, folder: Path):
    torch.save(theirs.state_dict(), folder / "hf.pt")
    tied = theirs.config.tie_word_embeddings
    options = {**options, "d_model": 32, "n_layer": 3, "vocab_size": VOCAB, "tie_embeddings": tied}
    return create_model(**options, weights=folder / "hf.pt")


@pytest.mark.parametrize("pair", [mamba_pair, lambda: mamba2_pair(1)], ids=["mamba", "mamba2"])
def test_logits_and_gradients_equal_transformers(pair, tmp_path):
    theirs, options = pair()
    ours = load(options, theirs, tmp_path)
    ids = torch.randint(0, VOCAB, (2, TOKENS))
    expected = theirs(ids).logits
    logits = ours(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    expected.square().mean().backward()
    logits.square().mean().backward()
    gradients = {n.replace("embeddings", "embedding"): p.grad for n, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert error < 1e-3, f"{name}: {error:.1e}"


def test_groups_of_mamba2_equal_transformers_up_to_the_norm(tmp_path):
    """transformers normalises all channels at once; the groups of the scan itself must agree."""
    theirs, options = mamba2_pair(2)
    ours = load(options, theirs, tmp_path)
    for layer in ours.backbone.layers:
        layer.mixer.norm.groups = 1
    ids = torch.randint(0, VOCAB, (2, TOKENS))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_an_untied_checkpoint_is_not_loaded_into_a_tied_model(tmp_path):
    theirs, options = mamba2_pair(1)
    assert not theirs.config.tie_word_embeddings
    theirs.config.tie_word_embeddings = True
    with pytest.raises(CheckpointError, match="tie_embeddings=False"):
        load(options, theirs, tmp_path)


def test_group_norm_of_mamba2_normalises_each_group():
    mixer = create_model("mamba2_nano", d_model=32, headdim=16, ngroups=2, d_state=4).backbone.layers[0].mixer
    scramble(mixer.norm)
    x = torch.randn(2, 3, 64)
    halves = [h / torch.sqrt(h.square().mean(-1, keepdim=True) + 1e-5) for h in x.chunk(2, dim=-1)]
    torch.testing.assert_close(mixer.norm(x), torch.cat(halves, dim=-1) * mixer.norm.weight)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mamba_lm_130m", {"A_log": (1536, 16), "D": (1536,), "in_proj.weight": (3072, 768),
                           "conv1d.weight": (1536, 1, 4), "conv1d.bias": (1536,), "x_proj.weight": (80, 1536),
                           "dt_proj.weight": (1536, 48), "dt_proj.bias": (1536,), "out_proj.weight": (768, 1536)}),
        ("mamba2_lm_130m", {"A_log": (24,), "D": (24,), "dt_bias": (24,), "in_proj.weight": (3352, 768),
                            "conv1d.weight": (1792, 1, 4), "conv1d.bias": (1792,), "norm.weight": (1536,),
                            "out_proj.weight": (768, 1536)}),
    ],
)  # fmt: skip
def test_names_and_shapes_are_those_of_the_public_checkpoints(name: str, layout: dict[str, tuple[int, ...]]):
    with torch.device("meta"):
        model = create_model(name, n_layer=2)
    vocab = 50280 if name == "mamba_lm_130m" else 50288
    expected = {"backbone.embedding.weight": (vocab, 768), "backbone.norm_f.weight": (768,)}
    expected["lm_head.weight"] = (vocab, 768)
    for i in range(2):
        expected[f"backbone.layers.{i}.norm.weight"] = (768,)
        expected |= {f"backbone.layers.{i}.mixer.{key}": shape for key, shape in layout.items()}
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == expected


@pytest.mark.parametrize("name", ["mamba_nano", "mamba2_nano"])
def test_sequence_models_are_causal(name: str):
    model = create_model(name, in_dim=3, d_model=32, n_layer=2)
    scramble(model, 0.1)
    x = torch.randn(1, 8, 3)
    changed = x.clone()
    changed[:, 5:] += 1
    before, after = model.forward_features(x), model.forward_features(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().min(dim=-1).values.max() > 1e-6


def test_mamba2_of_many_states_in_chunks_is_its_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = create_model("mamba2_nano", d_state=128, d_model=32, n_layer=2, headdim=16)
    ids = torch.randint(0, 256, (2, 90))
    results = []
    for least in (1, 10**6):
        monkeypatch.setattr(infssm.ops.ssd, "LEAST_STATES", {"cpu": least, "reference": least})
        logits = model(ids)
        grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        results.append([logits, *grads])
    for chunked, scanned in zip(*results, strict=True):
        assert_close(chunked, scanned, rtol=1e-4, atol=1e-4 * float(scanned.detach().abs().max().clamp_min(1e-3)))
