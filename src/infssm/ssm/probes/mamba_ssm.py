"""Probes of mamba_ssm's Mamba and Mamba2, and of the bidirectional Mamba of the Vision Mamba fork of mamba_ssm."""

from __future__ import annotations

from typing import Any

import torch

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ssm.probe import MixerInputs, refuse_generation, register_probe
from infssm.ssm.probes.selective import (
    convolve,
    packing,
    project,
    selective_inputs,
    selective_parameters,
    ssd_inputs,
    ssd_parameters,
    ssd_rows,
    state_space,
)
from infssm.ssm.space import StateSpace


def _input(inputs: MixerInputs, name: str) -> torch.Tensor:
    cache = inputs.kwargs.get("inference_params")
    refuse_generation(cache is not None and cache.seqlen_offset > 0)
    x: torch.Tensor = inputs.get(0, name)
    return x


def mamba_parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states of every direction."""
    directions = [(mixer.conv1d, mixer.x_proj, mixer.dt_proj, mixer.A_log)]
    if hasattr(mixer, "x_proj_b"):
        directions.append((mixer.conv1d_b, mixer.x_proj_b, mixer.dt_proj_b, mixer.A_b_log))
    rows = selective_parameters(which, in_proj=mixer.in_proj, directions=directions)
    if hasattr(mixer, "A_b_log") and not hasattr(mixer, "x_proj_b"):
        rows.append((mixer.A_b_log, None))
    return rows


@register_probe("mamba_ssm.modules.mamba_simple.Mamba", parameters=mamba_parameters)
def mamba(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of the forward scan and, for bidirectional layers, of the backward scan (in token order)."""
    x = project(mixer.in_proj, _input(inputs, "hidden_states"), slice(0, mixer.A_log.shape[0]))
    scan = selective_inputs(convolve(mixer.conv1d, x), mixer.x_proj, mixer.dt_proj, mixer.A_log)
    scans = [scan]
    if hasattr(mixer, "x_proj_b"):
        u = convolve(mixer.conv1d_b, x, reverse=True)
        scans.append(selective_inputs(u, mixer.x_proj_b, mixer.dt_proj_b, mixer.A_b_log))
    elif hasattr(mixer, "A_b_log"):  # type "v1": one set of projections, two transitions
        scans.append(scan._replace(A=-torch.exp(at_least_float32(mixer.A_b_log))))
    return [state_space(scan, inputs.options) for scan in scans]


def mamba2_parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states."""
    return ssd_parameters(which, mixer, mixer.ngroups, mixer.d_state)


@register_probe("mamba_ssm.modules.mamba2.Mamba2", parameters=mamba2_parameters)
@register_probe("mamba_ssm.modules.mamba2_simple.Mamba2Simple", parameters=mamba2_parameters)
def mamba2(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one scan with a scalar transition per head: a: [batch, tokens(, groups), 1]."""
    u = _input(inputs, "u")
    if u.ndim == 2:  # sequence parallel code puts batch and tokens into one dimension
        u = torch.unflatten(u, 0, (-1, inputs.get(1, "seqlen")))
    groups, n, heads = mixer.ngroups, mixer.d_state, mixer.nheads
    rows, conv_rows = ssd_rows(mixer.in_proj, groups, n, heads)
    bc, dt = torch.split(project(mixer.in_proj, u, rows), [2 * groups * n, heads], dim=-1)
    bc = convolve(mixer.conv1d, bc, rows=conv_rows, seq_idx=packing(u, inputs.kwargs))
    scan = ssd_inputs(bc, dt, mixer.A_log, mixer.dt_bias, groups)
    return [state_space(scan, inputs.options, limit=mixer.dt_limit)]
