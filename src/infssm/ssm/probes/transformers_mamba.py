"""Probes of transformers' Mamba-1 layers: Mamba, FalconMamba, Jamba."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infssm.models import StateRows
from infssm.ops import ScanInputs
from infssm.ssm.probe import MixerInputs, refuse_generation, register_probe
from infssm.ssm.probes.selective import (
    activation,
    convolve,
    masked,
    packing,
    project,
    selective_inputs,
    selective_parameters,
    state_space,
)
from infssm.ssm.space import StateSpace


def scan_inputs(mixer: Any, x: Tensor, mask: Tensor | None, seq_idx: Tensor | None) -> ScanInputs:
    """The inputs of the mixer's scan, from the convolution's input x: [batch, tokens, channels]."""
    u = masked(convolve(mixer.conv1d, x, act=activation(mixer), seq_idx=seq_idx), mask)
    inputs = selective_inputs(u, mixer.x_proj, mixer.dt_proj, mixer.A_log, norms=norms_of(mixer))
    return inputs._replace(seq_idx=seq_idx)


def norms_of(mixer: Any) -> tuple[Any, Any, Any]:
    """The norms of dt, B and C, if the family has them."""
    dt, b, c = (getattr(mixer, f"{name}_layernorm", None) for name in ("dt", "b", "c"))
    return dt, b, c


def mixer_input(mixer: Any, inputs: MixerInputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The hidden states [batch, tokens, width], padding mask and packing a transformers mixer was called with."""
    cache = inputs.get(1, "cache_params")
    refuse_generation(cache is not None and cache.has_previous_state(mixer.layer_idx))
    mask = inputs.get(2, "attention_mask")
    hidden = inputs.get(0, "hidden_states")
    return masked(hidden, mask), mask, packing(hidden, inputs.kwargs)


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the mixer's states."""
    direction = (mixer.conv1d, mixer.x_proj, mixer.dt_proj, mixer.A_log)
    norms = norms_of(mixer)
    return selective_parameters(which, in_proj=mixer.in_proj, directions=[direction], norms=norms)


@register_probe("transformers.models.mamba.modeling_mamba.MambaMixer", parameters=parameters)
@register_probe("transformers.models.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer", parameters=parameters)
@register_probe("transformers.models.jamba.modeling_jamba.JambaMambaMixer", parameters=parameters)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one forward scan."""
    hidden, mask, seq_idx = mixer_input(mixer, inputs)
    x = project(mixer.in_proj, hidden, slice(0, mixer.A_log.shape[0]))
    return [state_space(scan_inputs(mixer, x, mask, seq_idx), inputs.options, mask=mask)]
