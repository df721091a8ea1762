"""S4D for file formats without complex numbers: each layer's state spaces as one fixed, real convolution kernel."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.models.s4d import S4DMixer


class FixedConvolution(nn.Module):
    """What an S4D mixer computes on sequences of one length, in real arithmetic: [batch, tokens, channels].

    The kernel depends on the parameters alone, so it is computed once; the convolution is then plain sums of products.
    """

    weight: Tensor
    """[channels, 1, tokens], last token first."""

    def __init__(self, mixer: S4DMixer, tokens: int) -> None:
        super().__init__()
        self.register_buffer("weight", mixer.kernel(tokens).detach().flip(-1)[:, None])
        self.D, self.output_linear = mixer.D, mixer.output_linear

    def forward(self, u: Tensor) -> Tensor:
        """u: [batch, tokens, channels], as many tokens as the kernel has."""
        past = F.pad(u.transpose(1, 2), (self.weight.shape[-1] - 1, 0))
        y = F.conv1d(past, self.weight, groups=self.weight.shape[0]).transpose(1, 2)
        y = F.gelu(y + self.D * u)
        projection = self.output_linear[0]
        return F.glu(F.linear(y, projection.weight.squeeze(-1), projection.bias), dim=-1)  # type: ignore[operator, arg-type]


@torch.no_grad()
def with_fixed_convolutions(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy of ``model`` for sequences as long as those of ``example``; the model itself where it has no S4D layer."""
    found = [name for name, module in model.named_modules() if isinstance(module, S4DMixer)]
    if not found:
        return model
    model = copy.deepcopy(model)
    lengths: dict[str, int] = {}

    def note(name: str, inputs: tuple[Tensor, ...]) -> None:
        lengths[name] = inputs[0].shape[1]

    for name in found:
        model.get_submodule(name).register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs))
    model(example)
    for name, tokens in lengths.items():
        mixer = model.get_submodule(name)
        assert isinstance(mixer, S4DMixer)
        model.set_submodule(name, FixedConvolution(mixer, tokens))
    return model
