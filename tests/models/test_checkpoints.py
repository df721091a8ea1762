"""Files that fit, and files that do not: the error says what is wrong in short."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infssm.errors import CheckpointError
from infssm.models import create_model
from tests.compare import identical
from tests.models.small import SMALL, scramble

SPEC = SMALL["vim_nano"]


def vim(**more):
    return SPEC.build("vim_nano", **more)


@pytest.fixture
def state():
    model = vim()
    scramble(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(model, state) -> bool:
    return all(identical(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s, "epoch": 3}, lambda s: {"state_dict": s}])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_wrapped_and_prefixed_checkpoints_load(state, tmp_path, wrap, prefix):
    torch.save(wrap({prefix + name: value for name, value in state.items()}), tmp_path / "a.pth")
    assert equal(vim(weights=tmp_path / "a.pth"), state)


def test_safetensors_and_names_in_the_weights_folder(state, tmp_path, monkeypatch):
    save_file(state, tmp_path / "mine.safetensors")
    assert equal(vim(weights=tmp_path / "mine.safetensors"), state)
    monkeypatch.setenv("INFSSM_WEIGHTS", str(tmp_path))
    assert equal(vim(weights="mine"), state)
    with pytest.raises(CheckpointError, match="none named 'other'"):
        vim(weights="other")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_truncated_file(state, tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    torch.save(state, path) if suffix == ".pth" else save_file(state, path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="truncated"):
        vim(weights=path)


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps({"a": 1}, 2), pickle.dumps(print, 2)])
def test_a_file_that_is_no_checkpoint(tmp_path, content):
    path = tmp_path / "a.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path)):
        vim(weights=path)


class Bomb:
    """Unpickling it in the usual way ends the process."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_code_in_a_checkpoint_is_never_run(state, tmp_path):
    torch.save({"model": Bomb()}, tmp_path / "bomb.pth")
    with pytest.raises(CheckpointError, match="no state dict"):
        vim(weights=tmp_path / "bomb.pth")
    torch.save({"model": Bomb()}, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="more than tensors"):
        vim(weights=tmp_path / "legacy.pth")
    torch.save({"model": state, "extra": Bomb()}, tmp_path / "both.pth")
    assert equal(vim(weights=tmp_path / "both.pth"), state)


class Config(dict):
    """A configuration node as training scripts pickle them: a dict with attributes."""


def test_checkpoints_of_training_scripts_hold_arguments_and_numbers_too(state, tmp_path):
    config = Config(MODEL=Config(NAME="vim"))
    config.frozen = True
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    content = {
        "model": state, "optimizer": optimizer.state_dict(), "args": argparse.Namespace(lr=1e-3, out=Path("x")),
        "config": config, "max_accuracy": np.float64(80.5), "epoch": 299,
    }  # fmt: skip
    torch.save(content, tmp_path / "a.pth")
    assert equal(vim(weights=tmp_path / "a.pth"), state)


def test_a_list_of_tensors_is_no_state_dict(tmp_path):
    torch.save([torch.zeros(2)], tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="no state dict"):
        vim(weights=tmp_path / "a.pth")


def test_another_architecture_lists_missing_unexpected_and_mismatched(state, tmp_path):
    other = SMALL["mamba_nano"].build("mamba_nano")
    torch.save(other.state_dict(), tmp_path / "mamba.pth")
    with pytest.raises(CheckpointError) as caught:
        vim(weights=tmp_path / "mamba.pth")
    message = str(caught.value)
    assert "missing: cls_token" in message
    assert "unexpected: backbone.embedding.weight" in message
    assert "more)" in message
    assert len(message) < 900
    del state["norm_f.weight"]
    state["extra"] = torch.zeros(1)
    state["layers.0.mixer.D"] = torch.zeros(5)
    torch.save(state, tmp_path / "vim.pth")
    with pytest.raises(CheckpointError) as caught:
        vim(weights=tmp_path / "vim.pth")
    message = str(caught.value)
    assert "1 missing: norm_f.weight" in message
    assert "1 unexpected: extra" in message
    assert "1 mismatched: layers.0.mixer.D (5,) instead of (64,)" in message


def test_a_wider_model_is_a_mismatch_not_a_head_of_another_size(state, tmp_path):
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="mismatched"):
        vim(embed_dim=48, weights=tmp_path / "a.pth")


def test_a_model_is_left_alone_by_a_checkpoint_that_does_not_fit(state, tmp_path):
    from infssm.models.pretrained import load_weights

    model = vim()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    del state["norm_f.weight"]
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(CheckpointError):
        load_weights(model, tmp_path / "a.pth")
    assert equal(model, before)


def test_position_embeddings_of_no_square_grid(state, tmp_path):
    state["pos_embed"] = torch.zeros(1, 12, 32)
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="square"):
        vim(weights=tmp_path / "a.pth")


def test_foreign_models_without_a_backbone_refuse_weights(tmp_path):
    from infssm.errors import ConfigError
    from infssm.models import register_model
    from infssm.models.registry import MODELS

    register_model("plain_module_of_this_test")(lambda: torch.nn.Linear(1, 1))
    try:
        with pytest.raises(ConfigError, match="not a Backbone"):
            create_model("plain_module_of_this_test", weights=tmp_path)
    finally:
        del MODELS._items["plain_module_of_this_test"]
