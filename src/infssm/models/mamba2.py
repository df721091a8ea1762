"""Mamba-2: heads that share one scalar transition each, with parameter names of state-spaces/mamba."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.block import depthwise_conv, dt_bias
from infssm.models.mamba import continue_conv, initial_state
from infssm.models.mixer import (
    LayerState,
    RawStates,
    SSMMixer,
    StateRows,
    at_least_float32,
    beside_checkpoint,
    check_state_set,
)
from infssm.models.registry import register_model
from infssm.models.sequence import LanguageModel, SequenceClassifier
from infssm.ops import ScanInputs, add_rms_norm, causal_conv1d, mean_states, scan_ssd, scan_step
from infssm.ops.backend import can_fuse
from infssm.ops.ssd import LEAST_STATES
from infssm.ops.ssd_layer import SsdWeights, scan_projected


class RMSNormGated(nn.Module):
    """Weight of the norm after the gate; each of ``groups`` slices of the channels is normalised separately."""

    def __init__(self, dim: int, *, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.groups, self.eps = groups, eps

    def forward(self, gated: Tensor) -> Tensor:
        """gated: [batch, tokens, dim], the scan's output times silu(z)."""
        if self.groups == 1:
            return add_rms_norm(gated, None, self.weight, eps=self.eps)[0]
        split = at_least_float32(gated).reshape(*gated.shape[:-1], self.groups, -1)
        normed = split * torch.rsqrt(split.square().mean(-1, keepdim=True) + self.eps)
        return normed.reshape(gated.shape).to(gated.dtype) * self.weight


class Mamba2Mixer(SSMMixer):
    """Causal state space layer with a scalar transition per head: [batch, tokens, d_model] -> the same shape.

    Its states have ``a [batch, tokens, 1]`` (mean over heads; the transition is a times the identity) and
    ``b, c [batch, tokens, d_state]``; with more than one group everything has a group axis before the last one.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
    ) -> None:
        super().__init__()
        inner = expand * d_model
        if inner % headdim or (inner // headdim) % ngroups:
            raise ConfigError(f"{inner} channels do not split into heads of {headdim} in {ngroups} equal groups")
        heads = inner // headdim
        self.d_inner, self.d_state, self.headdim = inner, d_state, headdim
        self.nheads, self.ngroups = heads, ngroups
        conv_channels = inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, inner + conv_channels + heads, bias=False)
        self.conv1d = depthwise_conv(conv_channels, d_conv)
        self.dt_bias = nn.Parameter(dt_bias(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNormGated(inner, groups=ngroups)
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, state: LayerState | None = None
    ) -> Tensor | tuple[Tensor, LayerState]:
        """hidden: [batch, tokens, d_model]; mask: [batch, tokens], False where padded at the end.

        With a ``state`` the tokens continue a sequence, and the state after them is returned too.
        """
        projected: Tensor = self.in_proj(hidden)
        conv, stop = self.conv1d, self.tap is not None and self.tap.stop
        weights: tuple[Any, ...] = (conv.weight, conv.bias, self.A_log, self.D, self.dt_bias)
        # Whether there is a tap does not matter here: a checkpoint's recomputation takes the way the forward took.
        fused = state is None and conv.bias is not None and self.d_state >= LEAST_STATES["cpu"] and not stop
        if fused and self.scan_hook is None and can_fuse((projected, *weights)):
            y, xbc = scan_projected(projected, SsdWeights(*weights), inner=self.d_inner, groups=self.ngroups)
            self._record(projected[..., -self.nheads :], xbc, mask)
            after = None
        else:
            y, after = self._scan_by_steps(projected, mask, state)
        mixed: Tensor = self.out_proj(self.norm(y))
        return mixed if after is None else (mixed, after)

    def _scan_by_steps(
        self, projected: Tensor, mask: Tensor | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        """Between the projections by one operation after the other, if one call does not serve."""
        z, xbc, dt = torch.split(projected, [self.d_inner, self.conv1d.in_channels, self.nheads], dim=-1)
        if state is None:
            xbc, tail = causal_conv1d(xbc, self.conv1d.weight.squeeze(1), self.conv1d.bias), None
        else:
            xbc, tail = continue_conv(self.conv1d, xbc, state.tail)
        x, b, c = self._parts(xbc)
        a = -torch.exp(at_least_float32(self.A_log))
        inputs = ScanInputs(x, dt, a, b, c, self.D, z, self.dt_bias, delta_softplus=True)
        if state is not None:
            inputs = inputs._replace(initial_state=state.hidden)
        if self.scan_hook is not None:
            self.scan_hook(inputs)
        self._record(dt, xbc, mask)
        if state is None:
            return scan_ssd(inputs).y, None
        # A step forms one transition per head, the scan one per channel.
        y, last, _ = scan_step(inputs) if x.shape[1] == 1 else scan_ssd(inputs, last_state=True)
        assert last is not None
        return y, LayerState(last, tail)

    def initial_state(self, batch: int) -> LayerState:
        """The state before the first token: nothing was read."""
        return initial_state(self.conv1d, (batch, self.d_inner, self.d_state))

    def _record(self, dt: Tensor, xbc: Tensor, mask: Tensor | None) -> None:
        """Hand the states to the tap, if there is one; dt: [batch, tokens, heads], xbc: what was convolved."""
        if self.tap is None:
            return
        with beside_checkpoint():
            _, b, c = self._parts(xbc)
            # The mean over a head's channels is the head's own value.
            means = mean_states(
                dt,
                -torch.exp(at_least_float32(self.A_log))[:, None],
                delta_bias=self.dt_bias if self.tap.include_dt_bias else None,
                delta_softplus=True,
                groups=self.ngroups if self.ngroups > 1 else None,
                zoh=self.tap.zoh,
            )
            self.emit([RawStates(means.a, c, b, means.delta, means.zoh, mask)])

    def _parts(self, xbc: Tensor) -> tuple[Tensor, ...]:
        """x: [batch, tokens, channels]; B, C: [batch, tokens, n], with a group axis if there is more than one."""
        width = self.ngroups * self.d_state
        x, b, c = torch.split(xbc, [self.d_inner, width, width], dim=-1)
        if self.ngroups == 1:
            return x, b, c
        grouped = (*b.shape[:-1], self.ngroups, self.d_state)
        return x, b.view(grouped), c.view(grouped)

    def state_parameters(self, which: str) -> list[StateRows]:
        """Parameters that form (A, C) or (A, B, C).

        B and C come out of ``in_proj`` and the convolution without passing through x, so "ABC-full" has no more
        members than "ABC-direct".
        """
        check_state_set(which)
        inner, width = self.d_inner, self.ngroups * self.d_state
        first = inner + width if which == "AC-direct" else inner
        conv = slice(first, inner + 2 * width)
        rows: list[StateRows] = [(self.A_log, None), (self.dt_bias, None)]
        rows.append((self.in_proj.weight, slice(inner + first, None)))
        rows.append((self.conv1d.weight, conv))
        if self.conv1d.bias is not None:
            rows.append((self.conv1d.bias, conv))
        return rows


_NANO = {"d_model": 96, "n_layer": 4, "d_state": 16, "headdim": 32, "vocab_size": 256}


@register_model("mamba2_nano")
def mamba2_nano(**options: Any) -> SequenceClassifier:
    """Small Mamba-2 classifier; ids of ``vocab_size`` or, with ``in_dim``, real sequences [batch, tokens, in_dim]."""
    return SequenceClassifier(Mamba2Mixer, **{**_NANO, "num_classes": 10, **options})


@register_model("mamba2_130m")
def mamba2_130m(**options: Any) -> SequenceClassifier:
    """Mamba-2-130m as a sequence classifier; the backbone of state-spaces/mamba2-130m loads into it."""
    return SequenceClassifier(Mamba2Mixer, **{"vocab_size": 50288, **options})


@register_model("mamba2_lm_nano")
def mamba2_lm_nano(**options: Any) -> LanguageModel:
    """Small Mamba-2 language model, of bytes unless ``vocab_size`` is given."""
    return LanguageModel(Mamba2Mixer, **{**_NANO, "tie_embeddings": False, **options})


@register_model("mamba2_lm_130m")
def mamba2_lm_130m(**options: Any) -> LanguageModel:
    """Mamba-2-130m language model (public weights: state-spaces/mamba2-130m)."""
    return LanguageModel(Mamba2Mixer, **{"vocab_size": 50288, **options})
