"""One direction of a selective scan as Mamba and Vim parameterise it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.models.mixer import (
    RawStates,
    SSMMixer,
    StateRows,
    StateTap,
    at_least_float32,
    beside_checkpoint,
    states_only,
)
from infssm.models.state import LayerState
from infssm.ops import ScanInputs, causal_conv1d
from infssm.ops.backend import can_fuse
from infssm.ops.directions import DirectionStates, DirectionWeights, scan_directions


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
        return self.project(causal_conv1d(x, self.conv.weight.squeeze(1), self.conv.bias, reverse=self.reverse), z)

    def project(self, u: Tensor, z: Tensor) -> ScanInputs:
        """Project u [batch, tokens, channels], which is convolved; z gates the output."""
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

    def weights(self) -> DirectionWeights | None:
        """The parameters as one call reads them; None where a layer is another kind than it was built as, or hooked."""
        conv, x_proj, dt = self.conv, self.x_proj, self.dt_proj
        if type(conv) is not nn.Conv1d or type(x_proj) is not nn.Linear or type(dt) is not nn.Linear:
            return None
        bias: Tensor | None = x_proj.bias  # torch declares it as always there
        if conv.bias is None or bias is not None or is_hooked(conv, x_proj, dt):
            return None
        return DirectionWeights(conv.weight, conv.bias, x_proj.weight, dt.weight, dt.bias, self.A_log, self.D)

    def states(self, found: DirectionStates, tap: StateTap, mask: Tensor | None) -> RawStates:
        """The states that ``tap`` asks for, from what the scan formed."""
        if tap.include_dt_bias and not tap.zoh:
            return RawStates(a=found.a, c=found.c, b=found.b, delta=found.delta, zoh=None, mask=mask)
        with beside_checkpoint():
            delta = F.linear(found.low, self.dt_proj.weight)
            A, bias = -torch.exp(self.A_log), self.dt_proj.bias
            return states_only(ScanInputs(delta, delta, A, found.b, found.c, None, None, bias, True), tap, mask)

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


def run_directions(
    mixer: SSMMixer, xz: Tensor, ways: Sequence[Direction], *, out_scale: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """The sum of all directions' outputs, times ``out_scale``: in one call where it can be, else one by one.

    xz: [batch, tokens, 2 channels], what is scanned and what gates it. mask: [batch, tokens], False where padded.
    """
    tap = mixer.tap
    # Whether there is a tap does not matter: a checkpoint's recomputation takes the way that the forward took. One that
    # stops, or a hook on the scans' inputs, needs the operations one by one.
    if mixer.scan_hook is None and (tap is None or not tap.stop):
        weights: list[Tensor] = []
        for way in ways:
            weights += way.weights() or ()
        if len(weights) == len(ways) * len(DirectionWeights._fields) and can_fuse([xz, *weights]):
            reverse = [way.reverse for way in ways]
            y, states = scan_directions(xz, weights, reverse, scale=out_scale, states=tap is not None)
            if tap is not None:
                mixer.emit([way.states(found, tap, mask) for way, found in zip(ways, states, strict=True)])
            return y
    x, z = xz.chunk(2, dim=-1)
    first, *others = mixer.run_scans((way.prepare(x, z) for way in ways), out_scale=out_scale, mask=mask)
    for other in others:
        first = first + other
    return first


def continue_conv(conv: nn.Conv1d, x: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """`causal_conv1d` of x [batch, tokens, channels] after the inputs ``tail``, and the tail for the next chunk.

    tail: [batch, width - 1, channels]. Cloned, so that the state does not keep the chunk alive.
    """
    assert tail is not None
    inputs = torch.cat((tail.to(x.dtype), x), dim=1)
    if x.shape[1] == 1:
        summed = (inputs * conv.weight.squeeze(1).T).sum(1, keepdim=True)
        y = F.silu(summed if conv.bias is None else summed + conv.bias)
    else:
        y = causal_conv1d(inputs, conv.weight.squeeze(1), conv.bias)[:, tail.shape[1] :]
    return y, inputs[:, x.shape[1] :].clone()


def initial_state(conv: nn.Conv1d, shape: tuple[int, int, int]) -> LayerState:
    """The state before the first token; shape: [batch, channels, n] of the hidden state."""
    tail = conv.weight.new_zeros(shape[0], conv.kernel_size[0] - 1, conv.in_channels)
    return LayerState(at_least_float32(conv.weight.new_zeros(shape)), tail)


def is_hooked(*layers: nn.Module) -> bool:
    """Whether calling one of the layers runs more than its forward, so that its weights must not be read past it."""
    for layer in layers:
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return True
    return False
