"""Probes of Mamba-2 layers, of mamba_ssm and of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ops import ScanInputs
from infssm.ssm.probe import MixerInputs, register_probe
from infssm.ssm.probes.selective import (
    activation,
    convolve,
    every_row,
    mamba_ssm_input,
    masked,
    packing,
    project,
    rows_of,
    state_space,
    transformers_input,
)
from infssm.ssm.space import StateSpace


def _sizes(mixer: Any) -> tuple[int, int]:
    """Groups of heads that share B and C, and states."""
    if hasattr(mixer, "ngroups"):  # mamba_ssm
        return mixer.ngroups, mixer.d_state
    return mixer.n_groups, mixer.ssm_state_size


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states: rows of in_proj and of the convolution.

    B and C do not pass through x, so "ABC-full" has no more members than "ABC-direct".
    """
    groups, n = _sizes(mixer)
    heads, total, channels = len(mixer.A_log), len(mixer.in_proj.weight), len(mixer.conv1d.weight)
    width = groups * n * (1 if which == "AC-direct" else 2)
    rows = every_row(mixer, "A_log", "dt_bias") + rows_of(mixer.in_proj, slice(total - heads - width, total))
    return rows + rows_of(mixer.conv1d, slice(channels - width, channels))


def scan_inputs(mixer: Any, bc: Tensor, dt: Tensor) -> ScanInputs:
    """Inputs of the mixer's scan, without u: bc: [batch, tokens, 2 groups n]; dt: [batch, tokens, heads]."""
    groups, _ = _sizes(mixer)
    B, C = (torch.unflatten(part, -1, (groups, -1)) if groups > 1 else part for part in bc.chunk(2, dim=-1))
    A = -torch.exp(at_least_float32(mixer.A_log)).unsqueeze(-1)
    return ScanInputs(dt, dt, A, B, C, delta_bias=at_least_float32(mixer.dt_bias), delta_softplus=True)


def _scan(mixer: Any, hidden: Tensor, mask: Tensor | None, seq_idx: Tensor | None) -> ScanInputs:
    """The same from the hidden states, of the rows of in_proj for B, C and dt and the convolution's for B and C."""
    (groups, n), heads, total = _sizes(mixer), len(mixer.A_log), len(mixer.in_proj.weight)
    rows = slice(total - 2 * groups * n - heads, None)
    # FalconH1 scales the input and every block of the projection.
    projected = project(mixer.in_proj, hidden * getattr(mixer, "ssm_in_multiplier", 1), rows)
    if (scale := getattr(mixer, "mup_vector", None)) is not None:
        projected = projected * scale[..., rows]
    bc, dt = torch.split(projected, [2 * groups * n, heads], dim=-1)
    bc = convolve(mixer.conv1d, bc, rows=slice(-2 * groups * n, None), act=activation(mixer), seq_idx=seq_idx)
    return scan_inputs(mixer, masked(bc, mask), dt)


@register_probe(
    "mamba_ssm.modules.mamba2.Mamba2", "mamba_ssm.modules.mamba2_simple.Mamba2Simple", parameters=parameters
)
def mamba_ssm(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one scan with a scalar transition per head: a: [batch, tokens(, groups), 1]."""
    u = mamba_ssm_input(inputs, "u")
    if u.ndim == 2:  # sequence parallel code puts batch and tokens into one dimension
        u = torch.unflatten(u, 0, (-1, inputs.get(1, "seqlen")))
    return [state_space(_scan(mixer, u, None, packing(u, inputs.kwargs)), inputs.options, limit=mixer.dt_limit)]


@register_probe(
    "transformers.models.mamba2.modeling_mamba2.Mamba2Mixer",
    "transformers.models.bamba.modeling_bamba.BambaMixer",
    "transformers.models.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMambaLayer",
    "transformers.models.falcon_h1.modeling_falcon_h1.FalconH1Mixer",
    "transformers.models.zamba2.modeling_zamba2.Zamba2MambaMixer",
    "transformers.models.nemotron_h.modeling_nemotron_h.NemotronHMamba2Mixer",
    parameters=parameters,
)
def transformers(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one scan with a scalar transition per head: a: [batch, tokens(, groups), 1]."""
    hidden, mask, seq_idx = transformers_input(mixer, inputs)
    scan = _scan(mixer, hidden, mask, seq_idx)
    return [state_space(scan, inputs.options, mask=mask, limit=mixer.time_step_limit)]
