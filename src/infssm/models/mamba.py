"""Mamba: selective scan over a sequence, with parameter names of state-spaces/mamba."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from infssm.models.block import a_log, depthwise_conv, dt_bias
from infssm.models.mixer import SSMMixer, StateRows, beside_checkpoint, check_state_set, states_only
from infssm.models.registry import register_model
from infssm.models.selective import Direction, continue_conv, initial_state, run_directions
from infssm.models.sequence import LanguageModel, SequenceClassifier, classifier, language_model
from infssm.models.state import LayerState
from infssm.ops import scan, scan_step
from infssm.ops.backend import choose


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


def _mixers(d_model: int, n_layer: int, options: dict[str, Any]) -> list[SSMMixer]:
    own = {key: options.pop(key) for key in ("d_state", "d_conv", "expand") if key in options}
    return [MambaMixer(d_model, **own) for _ in range(n_layer)]


@register_model("mamba_nano")
def mamba_nano(*, d_model: int = 96, n_layer: int = 4, **options: Any) -> SequenceClassifier:
    """Small Mamba classifier; ids of ``vocab_size`` or, with ``in_dim``, real sequences [batch, tokens, in_dim]."""
    mixers = _mixers(d_model, n_layer, options)
    return classifier(mixers, d_model=d_model, **{"vocab_size": 256, "num_classes": 10, **options})


@register_model("mamba_130m")
def mamba_130m(*, d_model: int = 768, n_layer: int = 24, **options: Any) -> SequenceClassifier:
    """Mamba-130m as a sequence classifier; the backbone of state-spaces/mamba-130m loads into it."""
    return classifier(_mixers(d_model, n_layer, options), d_model=d_model, **options)


@register_model("mamba_lm_nano")
def mamba_lm_nano(*, d_model: int = 96, n_layer: int = 4, **options: Any) -> LanguageModel:
    """Small Mamba language model, of bytes unless ``vocab_size`` is given."""
    mixers = _mixers(d_model, n_layer, options)
    return language_model(mixers, d_model=d_model, **{"vocab_size": 256, "tie_embeddings": False, **options})


@register_model("mamba_lm_130m")
def mamba_lm_130m(*, d_model: int = 768, n_layer: int = 24, **options: Any) -> LanguageModel:
    """Mamba-130m language model (public weights: state-spaces/mamba-130m)."""
    return language_model(_mixers(d_model, n_layer, options), d_model=d_model, **options)
