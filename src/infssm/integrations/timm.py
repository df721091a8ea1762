"""Our models in timm's registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from infssm._torchvision import timm
from infssm.errors import ConfigError
from infssm.models import create_model, list_models


def register() -> list[str]:
    """Make ``timm.create_model("vim_small_patch16_224")`` and the like build our models.

    Returns the names added: none the second time. ConfigError names the extra to install where timm is absent.
    """
    registry = timm("models")
    added = [name for name in list_models() if not registry.is_model(name)]
    for name in added:
        registry.register_model(_entrypoint(name))
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


__all__ = ["register"]
