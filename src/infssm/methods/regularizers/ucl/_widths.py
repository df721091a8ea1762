"""Gaussian weights of a mixer: one width per output unit, drawn in training forwards, the mean in evaluation.

The means are the model's own parameters under their own names, so checkpoints, optimizers and copies of the model see
nothing new. For the length of a training forward of the mixer its weights are replaced by samples, which reaches
weights that the mixer uses directly (``A_log``, ``dt_proj``) as well as those used through a submodule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST = 1e-8
"""Widths are at least this, so that their logarithms exist."""


def sigma(rho: Tensor) -> Tensor:
    """``log(1 + exp(rho))``, at least ``SMALLEST``."""
    return F.softplus(rho).clamp_min(SMALLEST)


def inverse_sigma(width: Tensor) -> Tensor:
    """The rho whose sigma is ``width``."""
    return width + torch.log(-torch.expm1(-width))


def unit_shape(parameter: Tensor) -> torch.Size:
    """Shape of one value per output unit: the last axis is the input; entries of a vector are units of their own."""
    shape = parameter.shape
    return torch.Size((*shape[:-1], 1)) if parameter.ndim > 1 else shape


def unit_rms(parameter: Tensor) -> Tensor:
    """Root mean square of each unit's weights, of shape :func:`unit_shape`."""
    value = parameter.detach()
    return value.square().mean(dim=-1, keepdim=True).sqrt() if value.ndim > 1 else value.abs()


class Sampler:
    """Hooks of one mixer. Copies of the mixer get a sampler of their own."""

    def __init__(self, rho: dict[str, nn.Parameter], mask: dict[str, Tensor]) -> None:
        """``rho``, ``mask``: by the parameter's path inside the mixer, of shape :func:`unit_shape`."""
        self.rho = rho
        self.mask = mask
        self.active = False
        self._means: dict[str, Tensor] = {}

    def install(self, mixer: nn.Module) -> None:
        """Put the hooks on the mixer, before any other that reads its weights."""
        mixer.register_forward_pre_hook(self.draw, prepend=True)
        mixer.register_forward_hook(self.restore, always_call=True)

    def draw(self, mixer: nn.Module, args: Any) -> None:  # noqa: ARG002
        """Replace each mean by a sample around it."""
        if not (self.active and mixer.training):
            return
        for path, rho in self.rho.items():
            owner, name = _owner(mixer, path)
            mean = owner._parameters[name]
            assert mean is not None
            self._means[path] = mean
            noise = torch.randn_like(mean) * self.mask[path]
            owner._parameters[name] = mean + sigma(rho) * noise  # type: ignore[assignment]

    def restore(self, mixer: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        """Put the means back."""
        for path, mean in self._means.items():
            owner, name = _owner(mixer, path)
            owner._parameters[name] = mean  # type: ignore[assignment]
        self._means = {}


def _owner(mixer: nn.Module, path: str) -> tuple[nn.Module, str]:
    prefix, _, name = path.rpartition(".")
    return mixer.get_submodule(prefix), name
