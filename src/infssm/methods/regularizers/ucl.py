"""UCL: Gaussian weights with one width per output unit; certain units are held, uncertain ones may move.

The original is made for chains of linear layers. Here it acts on the weights that form a mixer's states, starts from
trained weights with widths relative to them, and knows one chain: the Δ rows of ``x_proj`` feed ``dt_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm._processes import this_share
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig, Context, Loader, ModelPair, Regularizer, TaskInfo, Terms
from infssm.methods.regularizers.quadratic import ParameterSet, Which
from infssm.ssm import find_mixers

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


class UCLConfig(ComponentConfig):
    """Options of :class:`UCL`. The paper gives no values; the original's for CIFAR are named."""

    params: Which = Field(
        "ABC-direct", description="parameters held: those that form (A, C), (A, B, C), or also what feeds them"
    )
    beta: float = Field(2e-3, ge=0, description="β on the widths (original: 2e-4 to 2e-3, MNIST 0.03)")
    alpha: float = Field(0.3, ge=0, description="α on the means in the first task (original: 0.3 to 5, MNIST 0.01)")
    width: float = Field(
        0.05, gt=0, description="initial width of a unit over the root mean square of its weights (trained weights)"
    )
    rho_lr_scale: float = Field(
        10.0, gt=0, description="learning rate of the widths over that of the weights (original: 1e-2 over 1e-3)"
    )
    first_task: bool = Field(
        False,
        description="regularize the first task too, towards the initial weights, as the original; off, it trains "
        "plainly and the widths keep their initial value",
    )


class _Weight(NamedTuple):
    """A weight with widths: its mean, rho and mask (one value per unit), and where its inputs come from."""

    mean: nn.Parameter
    rho: nn.Parameter
    mask: Tensor
    source: str | None


class _Bias(NamedTuple):
    """A deterministic vector, held with the strength of its weight's units."""

    value: nn.Parameter
    mask: Tensor
    weight: str


@register_method
class UCL(Regularizer):
    """Every unit learns its uncertainty; certain units are held, uncertain ones may move.

    The three terms of uncertainty-regularized continual learning, over the batch size B.
    ``mean``: ``α/2 ‖Λ (μ - μ*)‖²`` with Λ the larger of the unit's and its input's strength ``σ_init/σ*``.
    ``magnitude``: ``σ_init² ‖(μ*/σ*)² (μ - μ*)‖₁``. ``width``: ``β/2 Σ (r - log r + σ² - log σ²)``, ``r = (σ/σ*)²``.

    Paper: Ahn et al., Uncertainty-based Continual Learning with Adaptive Regularization, NeurIPS 2019, arXiv:1905.11614
    """

    name = "ucl"
    Config = UCLConfig
    own_first_task = True
    config: UCLConfig
    saved = ("initial", "old_mean", "old_rho")

    def __init__(self, config: UCLConfig, context: Context) -> None:
        super().__init__(config, context)
        self.acts_on_first_task = config.first_task
        parameters = ParameterSet(context.module, config.params, layers=context.layers)
        masks = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.parameters.items()}
        for member in parameters.members:  # ones in the rows of the set, zeros elsewhere
            member.take(masks[member.name]).fill_(1.0)
        self.weights: dict[str, _Weight] = {}
        self.biases: dict[str, _Bias] = {}
        for name, parameter in parameters.parameters.items():
            mask, weight = masks[name], f"{name.removesuffix('bias')}weight"
            if name.endswith("bias") and weight in masks:
                self.biases[name] = _Bias(parameter, mask, weight)
                continue
            rho = nn.Parameter(torch.zeros(unit_shape(parameter), dtype=parameter.dtype, device=parameter.device))
            source = re.sub(r"dt_projs?(?=[._])", "x_proj", name)  # its first units, Δ, are the inputs of dt_proj
            known = source if source != name and source in masks else None
            self.weights[name] = _Weight(parameter, rho, mask[..., :1].clone() if mask.ndim > 1 else mask, known)
        self.samplers: list[Sampler] = []
        for prefix, mixer in find_mixers(context.module, context.layers).items():
            start = f"{prefix}." if prefix else ""
            inside = {name.removeprefix(start): w for name, w in self.weights.items() if name.startswith(start)}
            sampler = Sampler({k: w.rho for k, w in inside.items()}, {k: w.mask for k, w in inside.items()})
            sampler.install(mixer)
            self.samplers.append(sampler)
        self.initial: dict[str, Tensor] = {}
        self.old_mean: dict[str, Tensor] = {}
        self.old_rho: dict[str, Tensor] = {}

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Set the first widths from the weights, and sample where this task is regularized."""
        self._follow_device()
        if not self.initial:
            for name, weight in self.weights.items():
                self.initial[name] = (self.config.width * unit_rms(weight.mean)).clamp_min(SMALLEST)
                weight.rho.data = inverse_sigma(self.initial[name])
            self._snapshot()
        self._sample(task)

    def _sample(self, task: TaskInfo | None) -> None:
        for sampler in self.samplers:
            sampler.active = task is not None and (task.index > 0 or self.config.first_task)

    def _follow_device(self) -> None:
        device = self.context.device
        for weight in self.weights.values():
            weight.rho.data, weight.mask.data = weight.rho.data.to(device), weight.mask.data.to(device)
        for bias in self.biases.values():
            bias.mask.data = bias.mask.data.to(device)
        self.initial, self.old_mean, self.old_rho = (
            {name: value.to(device) for name, value in stored.items()}
            for stored in (self.initial, self.old_mean, self.old_rho)
        )

    def _snapshot(self) -> None:
        self.old_rho = {name: weight.rho.detach().clone() for name, weight in self.weights.items()}
        self.old_mean = {name: weight.mean.detach().clone() for name, weight in self.weights.items()}
        self.old_mean |= {name: bias.value.detach().clone() for name, bias in self.biases.items()}

    def penalty(self, pair: ModelPair) -> Terms:  # noqa: ARG002
        """The terms ``mean``, ``magnitude`` (from the second task on) and ``width``."""
        mean, magnitude, width = [], [], []
        for name, weight in self.weights.items():
            held, moved = self.strength(name), weight.mean - self.old_mean[name]
            magnitude.append(((held * weight.mask * self.old_mean[name]).square() * moved.abs()).sum())
            if weight.source is not None:
                inputs = weight.mean.shape[-1]
                held = torch.maximum(held, self.strength(weight.source)[..., :inputs, 0].unsqueeze(-2))
            mean.append((weight.mask * held * moved).square().sum())
            variance = sigma(weight.rho).square()
            ratio = variance / sigma(self.old_rho[name]).square()
            width.append((weight.mask * (ratio - ratio.log() + variance - variance.log())).sum())
        for name, bias in self.biases.items():
            held = self.strength(bias.weight).reshape(bias.value.shape) * bias.mask
            moved = bias.value - self.old_mean[name]
            magnitude.append(((held * self.old_mean[name]).square() * moved.abs()).sum())
            mean.append((held * moved).square().sum())
        first, batch = self.context.current.index == 0, self.context.batch_size * this_share().world
        terms = {
            "mean": (self.config.alpha if first else 1.0) / (2 * batch) * torch.stack(mean).sum(),
            "width": self.config.beta / (2 * batch) * torch.stack(width).sum(),
        }
        return terms if first else terms | {"magnitude": torch.stack(magnitude).sum() / batch}

    def strength(self, name: str) -> Tensor:
        """``σ_init / σ*`` of each unit of a weight."""
        return self.initial[name] / sigma(self.old_rho[name])

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Hold means and widths where they are now."""
        self._snapshot()

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the widths: no weight decay, and a learning rate of their own through ``lr_scale``."""
        scale = self.config.rho_lr_scale
        group = {"name": "widths", "params": [w.rho for w in self.weights.values()], "weight_decay": 0.0}
        rates = [known["lr"] for known in groups if "lr" in known]
        return [*groups, group | {"lr_scale": scale} | ({"lr": scale * rates[0]} if rates else {})]

    def state_dict(self) -> dict[str, Any]:
        """Widths, and the means and widths held."""
        rho = {name: weight.rho.detach().clone() for name, weight in self.weights.items()}
        return super().state_dict() | {"rho": rho}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore widths, and the means and widths held."""
        super().load_state_dict(state)
        for name, weight in self.weights.items():
            weight.rho.data.copy_(state["rho"][name])
        self._follow_device()
        self._sample(self.context.task)
