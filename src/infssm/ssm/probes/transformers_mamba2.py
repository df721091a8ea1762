"""Probes of transformers' Mamba-2 layers: Mamba2, Bamba, GraniteMoeHybrid, FalconH1, Zamba2, NemotronH."""

from __future__ import annotations

from typing import Any

import torch

from infssm.models import StateRows
from infssm.ssm.probe import MixerInputs, register_probe
from infssm.ssm.probes.selective import (
    activation,
    convolve,
    masked,
    project,
    ssd_inputs,
    ssd_parameters,
    ssd_rows,
    state_space,
)
from infssm.ssm.probes.transformers_mamba import mixer_input
from infssm.ssm.space import StateSpace


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the mixer's states."""
    return ssd_parameters(which, mixer, mixer.n_groups, mixer.ssm_state_size)


@register_probe("transformers.models.mamba2.modeling_mamba2.Mamba2Mixer", parameters=parameters)
@register_probe("transformers.models.bamba.modeling_bamba.BambaMixer", parameters=parameters)
@register_probe(
    "transformers.models.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMambaLayer", parameters=parameters
)
@register_probe("transformers.models.falcon_h1.modeling_falcon_h1.FalconH1Mixer", parameters=parameters)
@register_probe("transformers.models.zamba2.modeling_zamba2.Zamba2MambaMixer", parameters=parameters)
@register_probe("transformers.models.nemotron_h.modeling_nemotron_h.NemotronHMamba2Mixer", parameters=parameters)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one scan with a scalar transition per head: a: [batch, tokens(, groups), 1]."""
    hidden, mask, seq_idx = mixer_input(mixer, inputs)
    groups, n, heads = mixer.n_groups, mixer.ssm_state_size, mixer.num_heads
    rows, conv_rows = ssd_rows(mixer.in_proj, groups, n, heads)
    # FalconH1 scales the input and every block of the projection.
    projected = project(mixer.in_proj, hidden * getattr(mixer, "ssm_in_multiplier", 1), rows)
    if (scale := getattr(mixer, "mup_vector", None)) is not None:
        projected = projected * scale[..., rows]
    bc, dt = torch.split(projected, [2 * groups * n, heads], dim=-1)
    bc = masked(convolve(mixer.conv1d, bc, rows=conv_rows, act=activation(mixer), seq_idx=seq_idx), mask)
    scan = ssd_inputs(bc, dt, mixer.A_log, mixer.dt_bias, groups)
    return [state_space(scan, inputs.options, mask=mask, limit=mixer.time_step_limit)]
