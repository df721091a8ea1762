"""Probe of transformers' Zamba: Mamba-1 with independent heads, each with its own projections."""

from __future__ import annotations

from typing import Any

import torch

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ops import ScanInputs
from infssm.ssm.probe import MixerInputs, register_probe
from infssm.ssm.probes.selective import activation, convolve, masked, project, state_space
from infssm.ssm.probes.transformers_mamba import mixer_input
from infssm.ssm.space import StateSpace


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states; heads share tensors, so no set cuts the projections into rows."""
    rows: list[StateRows] = [
        (p, None) for p in (mixer.A_log, mixer.dt_proj_weight, mixer.dt_proj_bias, mixer.x_proj_weight)
    ]
    if which == "ABC-full":
        modules = (mixer.conv1d, mixer.in_proj)
        rows += [(p, None) for module in modules for p in (module.weight, module.bias) if p is not None]
    return rows


@register_probe("transformers.models.zamba.modeling_zamba.ZambaMambaMixer", parameters=parameters)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States with the heads as groups: a, b, c: [batch, tokens, heads, n]."""
    hidden, mask, seq_idx = mixer_input(mixer, inputs)
    x = project(mixer.in_proj, hidden, slice(0, None, 2))  # x and gate alternate
    u = masked(convolve(mixer.conv1d, x, act=activation(mixer), seq_idx=seq_idx), mask)
    heads, n = mixer.n_mamba_heads, mixer.ssm_state_size
    x_proj = at_least_float32(mixer.x_proj_weight)
    projected = torch.einsum("bthd,hrd->bthr", torch.unflatten(u, -1, (heads, -1)), x_proj)
    dt, B, C = torch.split(projected, [mixer.time_step_rank, n, n], dim=-1)
    delta = torch.einsum("bthr,hdr->bthd", dt, at_least_float32(mixer.dt_proj_weight)).flatten(2)
    A = -torch.exp(at_least_float32(mixer.A_log)).flatten(0, 1)
    scan = ScanInputs(u, delta, A, B, C, delta_bias=at_least_float32(mixer.dt_proj_bias).flatten(), delta_softplus=True)
    return [state_space(scan, inputs.options, mask=mask)]
