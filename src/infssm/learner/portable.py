"""A model in a form that an exported program can hold: behind its input, for any length, without complex numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from infssm.methods.core.views import ViewsClassifier
from infssm.models.features import find_classifier
from infssm.models.s4d import S4DMixer
from infssm.ssm import unwrap


class RecurrentS4D(nn.Module):
    """An S4D mixer as a recurrence in real arithmetic, for sequences of any length: [batch, tokens, channels].

    ONNX has no complex numbers, and the Fourier transform of the mixer would fix the length.
    """

    a_real: Tensor
    a_imag: Tensor
    """Discrete transition [channels, n/2]."""
    c_real: Tensor
    c_imag: Tensor
    """What the states are read out by [channels, n/2]: twice C times the discretised B."""

    def __init__(self, mixer: S4DMixer) -> None:
        super().__init__()
        transition, factor = (part.detach() for part in mixer.kernel.discretize())
        readout = 2 * mixer.kernel.complex_c().detach() * factor
        for name, value in (("a", transition), ("c", readout)):
            # Separate tensors, since the body of scan may not read views of one.
            self.register_buffer(f"{name}_real", value.real.clone())
            self.register_buffer(f"{name}_imag", value.imag.clone())
        self.D, self.output_linear = mixer.D, mixer.output_linear

    def forward(self, u: Tensor) -> Tensor:
        """u: [batch, tokens, channels]."""
        from torch._higher_order_ops.scan import scan

        a, b, c, d = self.a_real, self.a_imag, self.c_real, self.c_imag

        def step(state: list[Tensor], token: Tensor) -> tuple[list[Tensor], Tensor]:
            real, imag = state
            real, imag = a * real - b * imag + token.unsqueeze(-1), b * real + a * imag
            return [real, imag], (c * real - d * imag).sum(-1)

        zeros = u.new_zeros(u.shape[0], *a.shape)
        _, y = scan(step, [zeros, zeros.clone()], u.transpose(0, 1))
        y = F.gelu(y.transpose(0, 1) + self.D * u)
        projection = self.output_linear[0]
        return F.glu(F.linear(y, projection.weight.squeeze(-1), projection.bias), dim=-1)  # type: ignore[operator, arg-type]


def with_recurrent_s4d(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose S4D layers are recurrences; the model itself where it has none."""
    if any(isinstance(module, S4DMixer) for module in model.modules()):
        model = copy.deepcopy(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, S4DMixer):
                model.set_submodule(name, RecurrentS4D(module))
    return model


class _CdistWithoutBranches(TorchFunctionMode):
    """Euclidean distances by their definition: torch.cdist takes another way above 25 rows, which fixes the batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.cdist and len(args) == 2 and options.get("p", 2.0) == 2.0:
            return (args[0].unsqueeze(-2) - args[1].unsqueeze(-3)).square().sum(-1).sqrt()
        return func(*args, **options)


Judge: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Features ``[n, d]`` to logits, probabilities ``[n, K]`` and whether a sample is like some class ``[n]``."""


class _Judging(nn.Module):
    """Stands in the place of a classifier, and has all outputs of a judge."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self._judge = judge

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :data:`Judge`."""
        logits, probabilities, known = self._judge(features)
        return logits, probabilities.float(), known


class Portable(nn.Module):
    """A model behind the steps that evaluation takes before it, reading logits of the first ``classes`` outputs.

    Args:
        model: model input ``[n, ...]`` to logits ``[n, K]``.
        before: what turns the input of the file into model input.
        classes: outputs beyond these belong to tasks that were not learnt; None keeps all.
        judge: of a learner; there are then three outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        before: nn.Module | None = None,
        classes: int | None = None,
        judge: Judge | None = None,
    ) -> None:
        super().__init__()
        self.model, self.before, self.classes = with_recurrent_s4d(model), before or nn.Identity(), classes
        if judge is not None:
            self.model = copy.deepcopy(model) if self.model is model else self.model
            place = find_classifier(unwrap(self.model))
            if isinstance(place.module, ViewsClassifier):
                place.module.fitted = _Judging(judge)
            else:
                place.replace(_Judging(judge))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Input of the file ``[n, ...]`` to logits ``[n, classes]``, with a judge to all its outputs."""
        with _CdistWithoutBranches():
            found: Tensor | tuple[Tensor, Tensor, Tensor] = self.model(self.before(x))
        return found[:, : self.classes] if isinstance(found, Tensor) and self.classes is not None else found
