"""A model from a folder, whichever library wrote it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from infssm._optional import require
from infssm._torchvision import torchvision
from infssm.errors import ConfigError
from infssm.models import from_pretrained


def open_model(folder: str | os.PathLike[str]) -> nn.Module:
    """The model of a folder that infssm, transformers or peft wrote; nothing is downloaded and no code of it is run.

    An adapter's base model must lie where the adapter says, and the parameters that the adapter trains are trainable.
    Of all other models every parameter is.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; give that of a run, of a transformers model or of an adapter")
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    if (path / "adapter_config.json").is_file():
        torchvision()  # transformers imports it, and the two wheels may not fit together
        peft: Any = require("peft", install="pip install peft")
        found: nn.Module = peft.AutoPeftModelForCausalLM.from_pretrained(path, is_trainable=True, **options)
        return found
    if (path / "config.json").is_file():
        if not _of_transformers(path / "config.json"):
            ours: nn.Module = from_pretrained(path)
            return ours
        torchvision()
        transformers: Any = require("transformers", install="pip install 'infssm[hf]'")
        whole: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
        return whole
    from infssm.learner.predict import load_classifier

    return load_classifier(path).model.requires_grad_(True)  # it was frozen to classify


def _of_transformers(config: Path) -> bool:
    try:
        return "model_type" in json.loads(config.read_text())
    except ValueError:
        return False
