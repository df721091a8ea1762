"""InfLoRA, and the LoRA pairs on state space mixers that it and frozen train: ``W = W₀ + B A``, A fixed, B from 0.

The model stays a plain one: its weight always holds the sum, so evaluation, checkpoints and export see nothing new. The
gradient of B follows from that of the weight, ``dB = dW Aᵀ``, which also reaches layers whose weight a kernel reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.bases.seq import Seq, SeqConfig
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import Context, Loader, TaskInfo
from infssm.methods.core.passes import require_loader, second_moment, sum_moments
from infssm.models.features import train_only
from infssm.ssm import find_mixers, unwrap


class LoRAConfig(SeqConfig):
    """Options of bases that train LoRA pairs."""

    first_session: Literal["all", "lora"] = Field(
        "all",
        description="what the first task trains: 'all' of the model, or 'lora': the pairs and the classifier, which "
        "suits pre-trained weights",
    )
    rank: int = Field(10, ge=1, description="rank of the LoRA pairs (InfLoRA: 10)")
    targets: tuple[str, ...] = Field(
        ("in_proj", "x_proj", "x_proj_b"),
        min_length=1,
        description="linear layers of each state space layer that get LoRA pairs, by name; those a layer lacks are "
        "left out",
    )


class Pair:
    """One weight ``[out, in]`` with its pair: A ``[r, in]`` while a task is trained, else None, and B ``[out, r]``."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        self.layer = layer
        self.B = nn.Parameter(layer.weight.new_zeros(layer.out_features, min(rank, layer.in_features)))
        self.A: Tensor | None = None
        self.start: Tensor | None = None
        """The weight without the pair."""
        layer.weight.register_post_accumulate_grad_hook(self._pass_on)  # type: ignore[no-untyped-call]

    def _pass_on(self, weight: Tensor) -> None:
        """Make the gradient of B of that of the weight, which adds up until :meth:`merge`; others may read it too."""
        if self.A is not None and weight.grad is not None:
            self.B.grad = weight.grad @ self.A.T

    def put(self, a: Tensor, b: Tensor | None = None, start: Tensor | None = None) -> None:
        """Begin with ``a: [r, in]``, and with a stored B and weight if training continues."""
        weight = self.layer.weight
        self.A = a.to(weight)
        self.B.data = torch.zeros_like(self.B, device=weight.device) if b is None else b.to(weight)
        self.start = weight.detach().clone() if start is None else start.to(weight)

    @torch.no_grad()
    def merge(self) -> None:
        """Write ``W₀ + B A`` into the weight."""
        if self.A is not None and self.start is not None:
            self.layer.weight.copy_(self.start + self.B @ self.A)
            self.layer.weight.grad = None


class Adapters:
    """The LoRA pairs of a model."""

    def __init__(self, context: Context, config: LoRAConfig, method: str) -> None:
        self.context, self.method = context, method
        mixers = find_mixers(unwrap(context.module), context.layers)
        found = {
            f"{name}.{target}": getattr(m, target, None) for name, m in mixers.items() for target in config.targets
        }
        layers = {name: layer for name, layer in found.items() if layer is not None}
        if other := [name for name, layer in layers.items() if type(layer) is not nn.Linear]:
            raise ConfigError(
                f"{method} puts LoRA on plain linear layers, and {other[0]} is none; choose other targets"
            )
        if not layers:
            raise ConfigError(f"{method}: no state space layer has a linear layer called {' or '.join(config.targets)}")
        self.pairs = {name: Pair(layer, config.rank) for name, layer in layers.items()}
        self._offered = False

    @property
    def active(self) -> bool:
        """Whether the pairs are in training."""
        return any(pair.A is not None for pair in self.pairs.values())

    def moments(self, loader: Loader) -> dict[str, Tensor]:
        """Second moments ``[in, in]`` of what each layer is given, over a task's data; float64."""

        def moments(inputs: Mapping[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
            return {name: second_moment(x.double().flatten(1, -2), mask) for name, x in inputs.items()}

        layers = {name: pair.layer for name, pair in self.pairs.items()}
        widths = {name: layer.in_features for name, layer in layers.items()}
        return sum_moments(self.context, loader, layers, widths, moments)

    def begin(self, moments: Mapping[str, Tensor]) -> None:
        """Train pairs whose A are the first left singular vectors of ``moments: [in, in]`` over √3; freeze the rest."""
        for name, pair in self.pairs.items():
            pair.put(first_directions(moments[name], pair.B.shape[1]))
        self.freeze()

    def freeze(self) -> None:
        """Gradients for the weights with pairs, which pass them on, and for the classifier."""
        train_only(unwrap(self.context.module), [pair.layer.weight for pair in self.pairs.values()])

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The optimizer trains B, without weight decay, instead of the weights with pairs."""
        self._offered = True
        if not self.active and self.context.task is not None:
            return groups
        weights = {pair.layer.weight for pair in self.pairs.values()} if self.active else set()
        kept = [{**group, "params": [p for p in group["params"] if p not in weights]} for group in groups]
        rates = [group["lr"] for group in groups if "lr" in group]
        own = {"name": "lora", "params": [pair.B for pair in self.pairs.values()], "weight_decay": 0.0}
        return [*(group for group in kept if group["params"]), own | ({"lr": rates[0]} if rates else {})]

    def after_step(self) -> None:
        """Write what the optimizer made of B into the weights."""
        if self.active and not self._offered:
            raise ConfigError(
                f"{self.method} trains parameters of its own: make the optimizer of "
                'method.param_groups([{"params": list(model.parameters())}])'
            )
        for pair in self.pairs.values():
            pair.merge()

    def end(self) -> None:
        """The weights keep what was learned; the pairs are done with."""
        for pair in self.pairs.values():
            pair.A = pair.start = None

    def state_dict(self) -> dict[str, Any]:
        """A, B and the weight without them of every pair in training."""
        return {
            name: {"A": pair.A, "B": pair.B.detach().clone(), "start": pair.start}
            for name, pair in self.pairs.items()
            if pair.A is not None
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        shapes = {name: tuple(pair.layer.weight.shape) for name, pair in self.pairs.items()}
        if state and {name: tuple(one["start"].shape) for name, one in state.items()} != shapes:
            raise ConfigError(f"{self.method}: these LoRA pairs belong to another model or to other targets")
        self.end()
        for name, one in state.items():
            self.pairs[name].put(one["A"], one["B"], one["start"])
        if state:
            self.freeze()


def first_directions(moment: Tensor, rank: int) -> Tensor:
    """``[rank, in]``: the first left singular vectors of ``moment: [in, in]``, over √3 as in InfLoRA's code."""
    directions: Tensor = torch.linalg.svd(moment).U[:, :rank].T / 3**0.5
    return directions


class InfLoRAConfig(LoRAConfig):
    """Options of :class:`InfLoRA`."""

    threshold: float = Field(
        0.95,
        ge=0,
        le=1,
        description="λ: share of the old inputs' second moment that is protected; grows to 1 over the tasks, where "
        "their number is known (paper: 0.95 CIFAR-100, 0.98 ImageNet-R)",
    )


class Subspace(NamedTuple):
    """A subspace of a layer's inputs, as DualGPM stores it: by whichever of basis and complement is smaller."""

    basis: Tensor
    """Orthonormal columns ``[in, k]`` in float64."""
    complement: bool
    """Whether the columns span what is free instead of what is protected."""

    def free(self, moment: Tensor) -> Tensor:
        """The part of ``moment: [in, in]`` outside the protected subspace."""
        inside = self.basis @ (self.basis.T @ moment)
        return inside if self.complement else moment - inside


@register_method
class InfLoRA(Seq):
    """After task 0, trains LoRA pairs on the mixers' input projections, and the classifier.

    A task's pair is ``B A / √3``: the fixed rows of A are the main directions of the task's own inputs outside those
    that earlier tasks use, and B is trained from 0. At the end of the task the pair is part of the weights. What old
    tasks use is the subspace that holds a share ε of the squared singular values of their inputs' second moments,
    ``ε = λ + (1 - λ) t / T`` after task t of T.

    Paper: Liang and Li, InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning, CVPR 2024,
    arXiv:2404.00228
    """

    name = "inflora"
    online = False
    Config = InfLoRAConfig
    config: InfLoRAConfig
    needs_loader = True

    def __init__(self, config: InfLoRAConfig, context: Context) -> None:
        super().__init__(config, context)
        self.adapters = Adapters(context, config, self.name)
        self.memory: dict[str, Subspace] = {}
        """The subspace of each layer's inputs that old tasks use."""

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Choose the directions of the task's pairs."""
        self.adapters.end()
        if task.index == 0 and self.config.first_session == "all":
            return
        if task.index > 0 and not self.memory:
            raise ConfigError(
                f"{self.name} has no inputs of earlier tasks: call method.end_task(task, loader) of the task before"
            )
        loader = require_loader(loader, self.name, "chooses the directions it trains by the task's data")
        moments = self.adapters.moments(loader)
        if self.memory:
            moments = {name: self.memory[name].free(moment) for name, moment in moments.items()}
        self.adapters.begin(moments)

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The pairs instead of their weights."""
        return self.adapters.param_groups(groups)

    def after_step(self) -> None:
        """Write the pairs into the weights."""
        self.adapters.after_step()

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Protect the directions that this task's inputs use."""
        loader = require_loader(loader, self.name, "measures which directions the task's inputs use")
        self.adapters.end()
        share = self.config.threshold
        if self.context.num_tasks is not None:
            share += (1 - share) * task.index / self.context.num_tasks
        for name, moment in self.adapters.moments(loader).items():
            self.memory[name] = protect(self.memory.get(name), moment, share)

    def state_dict(self) -> dict[str, Any]:
        """The protected subspaces, and the pairs in training."""
        return {"memory": {k: m._asdict() for k, m in self.memory.items()}, "pairs": self.adapters.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, and freeze what was frozen when it was saved."""
        memory = {name: Subspace(**one) for name, one in state["memory"].items()}
        widths = {name: pair.layer.in_features for name, pair in self.adapters.pairs.items()}
        if memory and {name: len(one.basis) for name, one in memory.items()} != widths:
            raise ConfigError(f"{self.name}: these subspaces belong to another model or to other targets")
        self.memory = {name: one._replace(basis=one.basis.to(self.context.device)) for name, one in memory.items()}
        self.adapters.load_state_dict(state["pairs"])
        if self.context.task is not None and self.context.task.index > 0:
            self.adapters.freeze()


def protect(memory: Subspace | None, moment: Tensor, share: float) -> Subspace:
    """The subspace that also holds ``share`` of ``moment: [in, in]``, in squared singular values (DualGPM)."""
    width = len(moment)
    if memory is None:
        u, ratio = _spectrum(moment, moment)
        count = int((ratio.cumsum(0) < share).sum())
        basis, complement = u[:, : max(count, 1)], False
    elif not memory.complement:
        u, ratio = _spectrum(memory.free(moment), moment)
        held = 1 - ratio.sum() + torch.cat([ratio.new_zeros(1), ratio.cumsum(0)])[:-1]  # before each direction is added
        count = _leading(held < share)
        basis, complement = torch.cat([memory.basis, u[:, :count]], dim=1)[:, :width], False
    else:
        u, ratio = _spectrum(memory.free(moment), moment)
        left = ratio.sum() - torch.cat([ratio.new_zeros(1), ratio.cumsum(0)])[:-1]
        count = _leading(left >= 1 - share)
        basis, complement = memory.basis, True
        if count:
            used = u[:, :count]
            rest = basis - used @ (used.T @ basis)
            basis = torch.linalg.svd(rest).U[:, : max(basis.shape[1] - count, 0)]
    if not complement and basis.shape[1] > width / 2:
        basis, complement = torch.linalg.svd(basis).U[:, basis.shape[1] :], True
    return Subspace(basis.contiguous(), complement)


def _spectrum(part: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors of ``part: [D, D]``, and its squared singular values over the sum of those of ``whole``."""
    u, values, _ = torch.linalg.svd(part)
    return u, values.square() / torch.linalg.matrix_norm(whole).square()


def _leading(holds: Tensor) -> int:
    """How many of the first entries are true."""
    return int(holds.to(torch.int64).cumprod(0).sum())
