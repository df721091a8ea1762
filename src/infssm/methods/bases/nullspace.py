"""Nullspace (Mamba-CL): matrices of selective layers move where that does not change the layers on old data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.bases.seq import Seq, SeqConfig
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import Context, Loader, TaskInfo
from infssm.methods.core.passes import masked, require_loader, second_moment, sum_moments
from infssm.models.features import train_only
from infssm.ssm import find_mixers, unwrap

_DIRECTIONS = (("x_proj", "dt_proj", "A_log"), ("x_proj_b", "dt_proj_b", "A_b_log"))
"""Names in a mixer, of Mamba and of the backward direction of Vim."""


class Matrix(NamedTuple):
    """Rows of a parameter whose steps are projected.

    ``moment`` names the second moment ``[D, D]`` that the projection follows from, ``side`` from where it multiplies.
    """

    parameter: Tensor
    rows: slice
    moment: str
    side: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Direction:
    """One scan: ``x_proj`` has rows for delta (rank), B (n) and C (n), in this order."""

    name: str
    x_proj: nn.Linear
    dt_proj: nn.Linear
    A_log: nn.Parameter

    def matrices(self) -> list[Matrix]:
        """The rows of x_proj for delta, B and C, and A_log."""
        n, rank, weight = self.A_log.shape[1], self.dt_proj.in_features, self.x_proj.weight
        return [
            Matrix(weight, slice(0, rank), f"{self.name}.x"),
            Matrix(weight, slice(rank, rank + n), f"{self.name}.delta_x"),
            Matrix(weight, slice(rank + n, rank + 2 * n), f"{self.name}.x"),
            Matrix(self.A_log, slice(None), f"{self.name}.delta", "left"),
        ]

    def moments(self, x: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Second moments of the scan's input ``x: [b, tokens, D]``, of its steps delta, and of their products.

        The layer is unchanged on ``x`` where updates U fulfil ``x U_delta = 0``, ``x U_C = 0``, ``delta U_A = 0`` and
        ``(Σ_t delta_t x_tᵀ) U_B = 0``.
        """
        low = F.linear(x, self.x_proj.weight[: self.dt_proj.in_features])
        delta = F.softplus(F.linear(low, self.dt_proj.weight, self.dt_proj.bias)).double()
        products = masked(delta, mask).transpose(1, 2) @ x.double()
        return {
            f"{self.name}.x": second_moment(x.double(), mask),
            f"{self.name}.delta": second_moment(delta, mask),
            f"{self.name}.delta_x": second_moment(products, None),
        }


def find_layers(model: nn.Module, layers: Any) -> tuple[list[Direction], dict[str, nn.Linear]]:
    """The scans of the selective layers that ``layers`` chooses, and the layers' output projections by name.

    ConfigError where there are layers of other kinds.
    """
    directions: list[Direction] = []
    outputs: dict[str, nn.Linear] = {}
    for name, mixer in find_mixers(unwrap(model), layers).items():
        present = [names for names in _DIRECTIONS if all(hasattr(mixer, one) for one in names)]
        parts = [Direction(f"{name}.{names[0]}", *(getattr(mixer, one) for one in names)) for names in present]
        out: Any = getattr(mixer, "out_proj", None)
        linear = [out, *(layer for part in parts for layer in (part.x_proj, part.dt_proj))]
        normed = any(hasattr(mixer, f"{one}_layernorm") for one in ("dt", "b", "c"))
        if not parts or normed or any(type(layer) is not nn.Linear for layer in linear):
            raise ConfigError(
                f"nullspace projects x_proj, A_log and out_proj of Mamba's and Vim's layers, and {name} "
                f"({type(mixer).__name__}) is of another kind or has adapters; use another method, or choose layers"
            )
        directions += parts
        outputs[f"{name}.out_proj"] = out
    return directions, outputs


Projection = Literal["projector", "released", "rate"]


class NullspaceConfig(SeqConfig):
    """Options of :class:`Nullspace`."""

    projection: Projection = Field(
        "projector",
        description="factor on each step: 'projector' ηP + (1-η)I with P the projector onto the null space; 'released' "
        "the authors' code, which divides P by its Frobenius norm √rank and so shrinks steps in every direction; "
        "'rate' a control that shrinks them as much but does not project: (η/‖P‖ + 1 - η)I",
    )
    eta: float = Field(0.95, ge=0, le=1, description="η: share of the projection (paper: 0.9 and 0.95)")


@register_method
class Nullspace(Seq):
    """After task 0, trains only x_proj, A_log, out_proj and the classifier, in the null space of old features.

    For each matrix the second moment of what it is multiplied with is summed over the data of all tasks. Every step of
    the optimizer is projected, ``W ← W₀ + (W - W₀)P̃``, onto the directions in which that moment is small: those from
    the elbow of its spectrum on.

    Paper: Cheng et al., Mamba-CL: Optimizing Selective State Space Model in Null Space for Continual Learning, 2024,
    arXiv:2411.15469
    """

    name = "nullspace"
    online = False
    Config = NullspaceConfig
    config: NullspaceConfig
    needs_loader = True

    def __init__(self, config: NullspaceConfig, context: Context) -> None:
        super().__init__(config, context)
        self.directions, self.outputs = find_layers(context.module, context.layers)
        self.matrices = [matrix for direction in self.directions for matrix in direction.matrices()]
        self.matrices += [Matrix(layer.weight, slice(None), name) for name, layer in self.outputs.items()]
        self.moments: dict[str, Tensor] = {}
        """Second moments by name, summed over all tasks so far: float64 ``[D, D]``."""
        self.projections: dict[str, Tensor] = {}
        """The factors of steps, by name of the moment that they are computed from."""
        self._before: dict[Tensor, Tensor] = {}
        for parameter in {matrix.parameter for matrix in self.matrices}:
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """From the second task on, gradients only for the projected matrices and the classifier."""
        if task.index > 0 and not self.moments:
            raise ConfigError(
                f"{self.name} has no features of earlier tasks: call method.end_task(task, loader) of the task before"
            )
        self._freeze(task)

    @torch.no_grad()
    def _note(self, parameter: Any) -> None:
        """Keep the value before the step; when its gradient arrives, because loading weights may change it earlier."""
        if self.projections:
            self._before[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def after_step(self) -> None:
        """Project the step that the optimizer took."""
        for parameter, rows, moment, side in self.matrices:
            if parameter in self._before:
                start, value = self._before[parameter][rows], parameter.data[rows]
                step, factor = value - start, self.projections[moment]
                value.copy_(start + (factor @ step if side == "left" else step @ factor))
        self._before = {}

    @torch.no_grad()
    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Add the second moments of this task's data, and project onto what they leave of the null space."""
        loader = require_loader(loader, self.name, "measures second moments of features on the task's data")
        inputs = {direction.name: direction.x_proj for direction in self.directions} | self.outputs
        new = sum_moments(self.context, loader, inputs, self._widths(), self._moments)
        self.moments = {name: self.moments[name] + moment if self.moments else moment for name, moment in new.items()}
        self._project()

    def _moments(self, inputs: Mapping[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
        """Those of a forward in which layers were given ``inputs``; ``mask: [b, tokens]`` leaves out padding."""
        found = {name: second_moment(inputs[name].double(), mask) for name in self.outputs}
        for direction in self.directions:
            found |= direction.moments(inputs[direction.name], mask)
        return found

    def _widths(self) -> dict[str, int]:
        """The width of every moment: that of the side from which it multiplies."""
        return {m.moment: m.parameter.shape[0 if m.side == "left" else 1] for m in self.matrices}

    def _project(self) -> None:
        options = self.config.projection, self.config.eta
        like = self.matrices[0].parameter
        self.projections = {name: projection(moment, *options).to(like) for name, moment in self.moments.items()}

    def _freeze(self, task: TaskInfo) -> None:
        if task.index > 0:
            train_only(unwrap(self.context.module), [matrix.parameter for matrix in self.matrices])

    def state_dict(self) -> dict[str, Any]:
        """The second moments; projections follow from them."""
        return {"moments": dict(self.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, and freeze what was frozen when it was saved."""
        moments = state["moments"]
        if moments and {name: len(moment) for name, moment in moments.items()} != self._widths():
            raise ConfigError(f"{self.name}: these second moments belong to another model or to other layers")
        self.moments = {name: moment.to(self.context.device) for name, moment in moments.items()}
        self._project()
        if self.context.task is not None:
            self._freeze(self.context.task)


def projection(moment: Tensor, kind: Projection, eta: float) -> Tensor:
    """The factor of steps, ``[D, D]``, for features with the second ``moment: [D, D]``."""
    eigenvalues, vectors = torch.linalg.eigh(moment)  # ascending; of a second moment they are its singular values
    null: Tensor = vectors.flip(1)[:, elbow(eigenvalues.flip(0).clamp(min=0)) :]
    share = (
        eta if kind == "projector" else eta / null.shape[1] ** 0.5
    )  # the norm of a projector is the root of its rank
    eye = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    return share * (eye if kind == "rate" else null @ null.T) + (1 - eta) * eye


def elbow(values: Tensor) -> int:
    """Where the null space begins in a spectrum ``values: [D]``, descending: at its largest second difference.

    As the release: spectra of 128 values or more are first smoothed by a Gaussian of σ 10, cut off at 4 σ and
    mirrored at the ends, and 1.5 % of the second differences at each end are left out.
    """
    smooth, cut = values, 0
    if len(values) >= 128:
        offsets = torch.arange(-40, 41, dtype=values.dtype, device=values.device)
        kernel = torch.exp(-0.5 * (offsets / 10) ** 2)
        mirrored = torch.cat([values[:40].flip(0), values, values[-40:].flip(0)])
        smooth = F.conv1d(mirrored[None, None], (kernel / kernel.sum())[None, None])[0, 0]
        cut = int(len(values) * 0.015)
    first = smooth[:-1] - smooth[1:]
    second = (first[:-1] - first[1:])[cut : len(values) - 2 - cut]
    if not len(second):  # fewer than three values have no second difference: all of them are null space
        return 0
    threshold = values[int(second.argmax()) + 1 + cut]
    return int((values >= threshold).sum()) - 1
