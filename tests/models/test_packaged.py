"""Weights inside the package: found by name, of the size promised, refused when changed."""

from __future__ import annotations

import pytest
import torch

from infssm.errors import CheckpointError
from infssm.models import create_model
from infssm.models import pretrained as _weights
from infssm.models.pretrained import PACKAGED, find_weights, read_state_dict

MODELS = {
    "cifar100-base": {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "stem": "conv"},
    "omniglot": {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 4, "in_chans": 1},
}


@pytest.mark.parametrize("name", PACKAGED)
def test_weights_load_by_name_into_their_model(name, monkeypatch, tmp_path):
    monkeypatch.setenv("INFSSM_WEIGHTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = find_weights(name)
    assert path.stat().st_size < 2 * 2**20
    stored = read_state_dict(path)
    model = create_model("vim_nano", num_classes=10, weights=name, **MODELS[name])
    state = model.state_dict()
    assert {key for key in state if not key.startswith("head.")} <= stored.keys()
    for key, value in stored.items():
        assert value.dtype == torch.float16
        assert value.isfinite().all()
        if not key.startswith("head."):
            assert torch.equal(state[key], value.float())


@pytest.mark.parametrize("name", PACKAGED)
def test_a_file_of_ones_own_comes_first(name, monkeypatch, tmp_path):
    monkeypatch.setenv("INFSSM_WEIGHTS", str(tmp_path))
    own = tmp_path / f"{name}.safetensors"
    own.write_bytes(b"mine")
    assert find_weights(name) == own


def test_a_changed_file_is_refused(monkeypatch):
    monkeypatch.setattr(_weights, "PACKAGED", {"omniglot": "0" * 64})
    with pytest.raises(CheckpointError, match="not the published file"):
        find_weights("omniglot")
    monkeypatch.setattr(_weights, "PACKAGED", {"nothing": "0" * 64})
    with pytest.raises(CheckpointError, match="no file"):
        find_weights("nothing")


def test_the_start_knows_shapes_of_digits_it_has_never_seen():
    """Nearest class mean on the digits with frozen features: far above the same model untrained."""
    from sklearn.datasets import load_digits

    from infssm.data.recipes import DIGITS

    bunch = load_digits()
    x, y = DIGITS.normalize(torch.from_numpy(bunch.images)[:, None] * (255 / 16)), torch.from_numpy(bunch.target)
    right = []
    for weights in ("omniglot", None):
        torch.manual_seed(0)
        model = create_model("vim_nano", num_classes=0, weights=weights, **MODELS["omniglot"]).eval()
        with torch.no_grad():
            found = torch.nn.functional.normalize(model(x), dim=1)
        means = torch.stack([found[:900][y[:900] == label].mean(0) for label in range(10)])
        right.append(float(((found[900:] @ means.T).argmax(1) == y[900:]).float().mean()))
    assert right[0] > 0.85
    assert right[0] > right[1] + 0.05
