"""Our models under their names in timm's registry."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from infssm.errors import ConfigError
from infssm.models._backbone import create_model
from infssm.models._registry import list_models


def register_with_timm() -> list[str]:
    """Make ``timm.create_model(name)`` build our models; return the names added (none the second time)."""
    try:
        timm_models = importlib.import_module("timm.models")
    except ModuleNotFoundError as error:
        raise ConfigError("timm is not installed: pip install 'infssm[bench]'") from error
    added = [name for name in list_models() if not timm_models.is_model(name)]
    for name in added:
        timm_models.register_model(_entrypoint(name))
    return added


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    def build(*, pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            raise ConfigError(f"no weights of {name} are hosted with timm: pass weights=path instead of pretrained")
        for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            options.pop(key, None)
        model: nn.Module = create_model(name, **options)
        return model

    build.__name__ = name
    return build
