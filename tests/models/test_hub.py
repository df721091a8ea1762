"""Models of transformers by ``hf:``: no code of theirs, no random weights, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infssm.errors import CheckpointError, ConfigError
from infssm.learner.setup import any_model
from infssm.models.hub import hub_model
from tests.fuzz import hub_folders

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hub_folders.make_folder(tmp_path)
    return tmp_path


def test_a_sound_folder(folder: Path) -> None:
    model = hub_model(f"hf:{folder}")
    assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 16)


def test_code_of_a_folder_runs_only_where_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise RuntimeError('code of the folder was run')\n")
    with pytest.raises(CheckpointError, match="if you trust it"):
        any_model(f"hf:{folder}", {})
    with pytest.raises(CheckpointError, match="code of the folder was run"):
        any_model(f"hf:{folder}", {"trust_remote_code": True})
    with pytest.raises(ConfigError, match=r"only model\.options is trust_remote_code"):
        any_model(f"hf:{folder}", {"vocab_size": 3})


def test_missing_tensors_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["backbone.layers.0.mixer.A_log"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors are missing .*mixer\.A_log"):
        hub_model(f"hf:{folder}")


def test_a_model_far_larger_than_its_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 10**12}))
    with pytest.raises(CheckpointError, match=r"config\.json describes"):
        hub_model(f"hf:{folder}", weights=False)
