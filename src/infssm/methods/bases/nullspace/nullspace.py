"""Nullspace (Mamba-CL): matrices of selective layers move where that does not change the layers on old data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from infssm.errors import ConfigError
from infssm.methods.bases.moments import gather
from infssm.methods.bases.nullspace._layers import Gathering, find_layers
from infssm.methods.bases.seq import Seq, SeqConfig
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import Context, Loader, TaskInfo
from infssm.methods.core.passes import require_loader
from infssm.models.features import output_layer
from infssm.ssm import unwrap

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
    """After task 0, trains x_proj, A_log, out_proj and the classifier alone, in the null space of old features.

    For each matrix the second moment of what it is multiplied with is summed over the data of all tasks. Every step of
    the optimizer is projected, ``W ← W₀ + (W - W₀)P̃``, onto the directions in which that moment is small: those from
    the elbow of its spectrum on.

    Paper: Cheng et al., Mamba-CL: Optimizing Selective State Space Model in Null Space for Continual Learning, 2024,
    arXiv:2411.15469
    """

    name = "nullspace"
    online: ClassVar[bool] = False
    Config = NullspaceConfig
    config: NullspaceConfig
    needs_loader: ClassVar[bool] = True

    def __init__(self, config: NullspaceConfig, context: Context) -> None:
        super().__init__(config, context)
        self.layers = find_layers(context.module, context.layers)
        self.matrices = [matrix for layer in self.layers for matrix in layer.matrices()]
        self.moments: dict[str, Tensor] = {}
        """Second moments by name, summed over all tasks so far: float64 ``[D, D]``."""
        self.projections: dict[str, Tensor] = {}
        """What steps are multiplied by, by name of the moment that it follows from."""
        self._before: dict[Tensor, Tensor] = {}
        for parameter in {matrix.parameter for matrix in self.matrices}:
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """From the second task on, gradients for the projected matrices and the classifier alone."""
        if task.index > 0 and not self.moments:
            raise ConfigError(
                f"{self.name} knows no features of the past: call method.end_task(task, loader) of the task before"
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
        new = gather(self.context, loader, self._widths(), lambda stack: Gathering(self.layers, stack).take)
        self.moments = {name: self.moments[name] + moment if self.moments else moment for name, moment in new.items()}
        self._project()

    def _widths(self) -> dict[str, int]:
        """The width of every moment: that of the side from which it multiplies."""
        return {m.moment: m.parameter.shape[0 if m.side == "left" else 1] for m in self.matrices}

    def _project(self) -> None:
        options = self.config.projection, self.config.eta
        like = self.matrices[0].parameter
        self.projections = {name: projection(moment, *options).to(like) for name, moment in self.moments.items()}

    def _freeze(self, task: TaskInfo) -> None:
        if task.index > 0:
            module = unwrap(self.context.module)
            module.requires_grad_(False)
            output_layer(module).requires_grad_(True)
            for matrix in self.matrices:
                matrix.parameter.requires_grad_(True)

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
    """What steps are multiplied by, ``[D, D]``, where features have the second ``moment: [D, D]``."""
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
