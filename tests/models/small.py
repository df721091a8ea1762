"""Every registered model, made small, with an input that fits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infssm.models import RawStates, SSMMixer, create_model


class Small(NamedTuple):
    options: dict[str, Any]
    make_input: Callable[[], Tensor]
    classes: int = 7

    def build(self, name: str, **more: Any) -> Any:
        return create_model(name, **{**self.options, **more})


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def ids() -> Tensor:
    return torch.randint(0, 50, (2, 9))


def reals() -> Tensor:
    return torch.randn(2, 9, 3)


_VIM = Small({"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "d_state": 4, "num_classes": 7}, images)
_MAMBA = {"d_model": 32, "n_layer": 2, "d_state": 4, "vocab_size": 50}
_VMAMBA = Small({"depths": (1, 1), "embed_dim": 16, "d_state": 3, "num_classes": 7}, images)
_GENERATIVE = Small(
    {"d_model": 32, "n_layer": 2, "d_state": 4, "in_chans": 3, "side": 4, "levels": 5, "num_classes": 7}, images
)
_S4D = Small({"d_model": 16, "n_layer": 2, "d_state": 8, "in_dim": 3, "num_classes": 7}, reals)

SMALL: dict[str, Small] = {
    "vim_nano": _VIM,
    "vim_tiny_patch16_224": _VIM,
    "vim_small_patch16_224": _VIM,
    "vim_base_patch16_224": _VIM,
    "mamba_nano": Small({**_MAMBA, "num_classes": 7}, ids),
    "mamba_130m": Small({**_MAMBA, "in_dim": 3, "pooling": "last", "num_classes": 7}, reals),
    "mamba_lm_130m": Small(_MAMBA, ids, classes=50),
    "mamba_lm_nano": Small(_MAMBA, ids, classes=50),
    "mamba2_nano": Small({**_MAMBA, "headdim": 16, "num_classes": 7}, ids),
    "mamba2_130m": Small({**_MAMBA, "headdim": 16, "ngroups": 2, "num_classes": 7}, ids),
    "mamba2_lm_130m": Small({**_MAMBA, "headdim": 8}, ids, classes=50),
    "mamba2_lm_nano": Small({**_MAMBA, "headdim": 16}, ids, classes=50),
    "mamba_generative_nano": _GENERATIVE,
    "mamba2_generative_nano": _GENERATIVE._replace(options={**_GENERATIVE.options, "headdim": 16}),
    "s4d_nano": _S4D,
    "s4d_base": _S4D._replace(options={**_S4D.options, "discretization": "bilinear", "prenorm": True}),
    "vmamba_nano": _VMAMBA,
    "vmamba_tiny": _VMAMBA,
    "vmamba_small": _VMAMBA,
    "vmamba_base": _VMAMBA._replace(options={**_VMAMBA.options, "ssm_ratio": 2.0}),
}

# One model per kind of mixer, for the checks that do not depend on the registered name.
KINDS = ["vim_nano", "mamba_nano", "mamba_130m", "mamba2_nano", "mamba2_130m", "s4d_nano", "s4d_base", "vmamba_base"]


class Stopped(Exception):
    """Raised by a stopping tap."""


class Tap:
    """Keeps what mixers emit."""

    def __init__(self, *, zoh: bool = False, include_dt_bias: bool = True, stop: bool = False) -> None:
        self.zoh, self.include_dt_bias, self.stop = zoh, include_dt_bias, stop
        self.emitted: list[tuple[SSMMixer, list[RawStates]]] = []

    def emit(self, mixer: SSMMixer, states: list[RawStates]) -> None:
        self.emitted.append((mixer, states))
        if self.stop:
            raise Stopped


def mixers(model: nn.Module) -> list[SSMMixer]:
    return [module for module in model.modules() if isinstance(module, SSMMixer)]


def scramble(model: nn.Module, std: float = 0.2) -> None:
    """Move every parameter away from its initial value, so that nothing is zero, one, or alike by chance."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += std * torch.randn_like(parameter)
