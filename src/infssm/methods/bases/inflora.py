"""InfLoRA: LoRA pairs in directions of the new task's inputs that old tasks do not use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from infssm.errors import ConfigError
from infssm.methods.bases.lora import Adapters, LoRAConfig
from infssm.methods.bases.seq import Seq
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import Context, Loader, TaskInfo
from infssm.methods.core.passes import require_loader


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
    online: ClassVar[bool] = False
    Config = InfLoRAConfig
    config: InfLoRAConfig
    needs_loader: ClassVar[bool] = True

    def __init__(self, config: InfLoRAConfig, context: Context) -> None:
        super().__init__(config, context)
        self.adapters = Adapters(context, config, self.name)
        self.memory: dict[str, Subspace] = {}
        """What old tasks use of each layer's inputs."""

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Choose the directions of the task's pairs."""
        self.adapters.end()
        if task.index == 0 and self.config.first_session == "all":
            return
        if task.index > 0 and not self.memory:
            raise ConfigError(
                f"{self.name} knows no inputs of the past: call method.end_task(task, loader) of the task before"
            )
        loader = require_loader(loader, self.name, "chooses the directions it trains by the task's data")
        moments = self.adapters.moments(loader)
        if self.memory:
            moments = {name: self.memory[name].free(moment) for name, moment in moments.items()}
        self.adapters.begin(moments)

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The pairs in the place of their weights."""
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
