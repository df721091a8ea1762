"""One direction of a selective scan as Mamba and Vim parameterise it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.kernels import ScanInputs, causal_conv1d
from infssm.models.mixer import StateRows, at_least_float32


class Direction(NamedTuple):
    """Parameters of one scan direction; ``x_proj`` has rows for delta (rank), B (n) and C (n), in this order."""

    conv: nn.Conv1d
    x_proj: nn.Linear
    dt_proj: nn.Linear
    A_log: nn.Parameter
    D: nn.Parameter
    reverse: bool = False

    def prepare(self, x: Tensor, z: Tensor) -> ScanInputs:
        """Convolve and project x [batch, tokens, channels]; z gates the output."""
        u = causal_conv1d(x, self.conv.weight.squeeze(1), self.conv.bias, reverse=self.reverse)
        n = self.A_log.shape[1]
        low, b, c = self.x_proj(u).split([self.dt_proj.in_features, n, n], dim=-1)
        return ScanInputs(
            u=u,
            delta=F.linear(low, self.dt_proj.weight),
            A=-torch.exp(at_least_float32(self.A_log)),
            B=b,
            C=c,
            D=self.D,
            z=z,
            delta_bias=self.dt_proj.bias,
            delta_softplus=True,
            reverse=self.reverse,
        )

    def state_parameters(self, which: str) -> list[StateRows]:
        """The parameter set ``which`` of this direction, without ``in_proj``."""
        weight = self.x_proj.weight
        rows: list[StateRows] = [(self.A_log, None), (self.dt_proj.weight, None), (self.dt_proj.bias, None)]
        if which == "AC-direct":
            rank, n = self.dt_proj.in_features, self.A_log.shape[1]
            return [*rows, (weight, slice(0, rank)), (weight, slice(rank + n, rank + 2 * n))]
        rows.append((weight, None))
        if which == "ABC-full":
            rows.append((self.conv.weight, None))
            if self.conv.bias is not None:
                rows.append((self.conv.bias, None))
        return rows


def depthwise_conv(channels: int, width: int) -> nn.Conv1d:
    """Parameters of a depthwise causal convolution (weight [channels, 1, width], bias [channels])."""
    return nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1)
