"""Our models in timm's registry."""

from __future__ import annotations

from infssm.data.torchvision import timm as guarded_timm
from infssm.models import register_with_timm


def register() -> list[str]:
    """Make ``timm.create_model("vim_small_patch16_224")`` and the like work; return the names added."""
    guarded_timm()
    return register_with_timm()


__all__ = ["register"]
