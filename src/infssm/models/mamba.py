"""Mamba, with parameter names of state-spaces/mamba, and the directions of selective scans that Vim shares with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.models.block import a_log, depthwise_conv, dt_bias
from infssm.models.mixer import (
    LayerState,
    RawStates,
    SSMMixer,
    StateRows,
    StateTap,
    at_least_float32,
    beside_checkpoint,
    check_state_set,
    states_only,
)
from infssm.models.registry import register_model
from infssm.models.sequence import LanguageModel, SequenceClassifier
from infssm.ops import ScanInputs, causal_conv1d, scan, scan_step
from infssm.ops.backend import can_fuse, choose
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
        """The parameters as one call reads them; None if a layer is another kind than it was built as, or hooked."""
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


class MambaMixer(SSMMixer):
    """Causal selective state space layer: [batch, tokens, d_model] -> [batch, tokens, d_model]."""

    def __init__(self, d_model: int, *, d_state: int = 16, d_conv: int = 4, expand: int = 2) -> None:
        super().__init__()
        inner, rank = expand * d_model, math.ceil(d_model / 16)
        self.d_inner, self.d_state, self.dt_rank = inner, d_state, rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=False)
        self.A_log = a_log(inner, d_state)
        self.D = nn.Parameter(torch.ones(inner))
        self.conv1d = depthwise_conv(inner, d_conv)
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.out_proj = nn.Linear(inner, d_model, bias=False)
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt_bias(inner))

    @property
    def direction(self) -> Direction:
        """The parameters of the scan."""
        return Direction(self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, state: LayerState | None = None
    ) -> Tensor | tuple[Tensor, LayerState]:
        """hidden: [batch, tokens, d_model]; mask: [batch, tokens], False where padded at the end.

        With a ``state`` the tokens continue a sequence, and the state after them is returned too.
        """
        xz = self.in_proj(hidden)
        if state is None:
            mixed: Tensor = self.out_proj(run_directions(self, xz, [self.direction], mask=mask))
            return mixed
        x, z = xz.chunk(2, dim=-1)
        u, tail = continue_conv(self.conv1d, x, state.tail)
        inputs = self.direction.project(u, z)._replace(initial_state=state.hidden)
        if self.scan_hook is not None:
            self.scan_hook(inputs)
        if self.tap is not None:
            with beside_checkpoint():
                self.emit([states_only(inputs, self.tap, None)])
        # The compiled scan of one token is as fast as a step (batch 1), or by a quarter faster (batch 128).
        step = hidden.shape[1] == 1 and choose(None, u, inputs.delta, state.hidden) == "reference"
        y, last, _ = scan_step(inputs) if step else scan(inputs, last_state=True)
        assert last is not None
        return self.out_proj(y), LayerState(last, tail)

    def initial_state(self, batch: int) -> LayerState:
        """The state before the first token: nothing was read."""
        return initial_state(self.conv1d, (batch, self.d_inner, self.d_state))

    def state_parameters(self, which: str) -> list[StateRows]:
        """Parameters that form (A, C) or (A, B, C), with the rows that matter."""
        check_state_set(which)
        rows = self.direction.state_parameters(which)
        return [*rows, (self.in_proj.weight, slice(0, self.d_inner))] if which == "ABC-full" else rows


_NANO = {"d_model": 96, "n_layer": 4, "vocab_size": 256}


@register_model("mamba_nano")
def mamba_nano(**options: Any) -> SequenceClassifier:
    """Small Mamba classifier; ids of ``vocab_size`` or, with ``in_dim``, real sequences [batch, tokens, in_dim]."""
    return SequenceClassifier(MambaMixer, **{**_NANO, "num_classes": 10, **options})


@register_model("mamba_130m")
def mamba_130m(**options: Any) -> SequenceClassifier:
    """Mamba-130m as a sequence classifier; the backbone of state-spaces/mamba-130m loads into it."""
    return SequenceClassifier(MambaMixer, **options)


@register_model("mamba_lm_nano")
def mamba_lm_nano(**options: Any) -> LanguageModel:
    """Small Mamba language model, of bytes unless ``vocab_size`` is given."""
    return LanguageModel(MambaMixer, **{**_NANO, "tie_embeddings": False, **options})


@register_model("mamba_lm_130m")
def mamba_lm_130m(**options: Any) -> LanguageModel:
    """Mamba-130m language model (public weights: state-spaces/mamba-130m)."""
    return LanguageModel(MambaMixer, **options)
