"""Probes of Mamba-1 layers: mamba_ssm and its Vision Mamba fork, mambapy, transformers, Zamba and MambaVision.

All of them call the same layers by the same names, so one list of parameters serves all but Zamba, whose heads have
projections of their own. They differ in what the mixer is called with and in what stands between the convolution and
the scan.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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
    project,
    rows_of,
    state_space,
    transformers_input,
)
from infssm.ssm.space import StateSpace


def _norms(mixer: Any) -> list[Any]:
    """The norms of dt, B and C, None where the family has none."""
    return [getattr(mixer, f"{x}_layernorm", getattr(mixer, f"{x.upper()}_layernorm", None)) for x in ("dt", "b", "c")]


def _x(mixer: Any, hidden: Tensor) -> Tensor:
    """What the convolution is given: the first half of the input projection."""
    return project(mixer.in_proj, hidden, slice(0, mixer.A_log.shape[0]))


def _scan(mixer: Any, u: Tensor, end: str = "") -> ScanInputs:
    """The inputs of a scan from the convolved u: [batch, tokens, channels]; end: of the direction's layers' names."""
    x_proj, dt_proj, A_log = (getattr(mixer, name) for name in (f"x_proj{end}", f"dt_proj{end}", f"A{end}_log"))
    n = A_log.shape[-1]
    projected = project(x_proj, u)
    parts = torch.split(projected, [projected.shape[-1] - 2 * n, n, n], dim=-1)
    dt, B, C = (part if norm is None else norm(part) for part, norm in zip(parts, _norms(mixer), strict=True))
    delta = F.linear(at_least_float32(dt), at_least_float32(dt_proj.weight))
    bias = None if dt_proj.bias is None else at_least_float32(dt_proj.bias)
    return ScanInputs(u, delta, -torch.exp(at_least_float32(A_log)), B, C, delta_bias=bias, delta_softplus=True)


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states of every direction."""
    rows: list[StateRows] = []
    for end in ("", "_b") if hasattr(mixer, "x_proj_b") else ("",):
        n, weight = mixer.A_log.shape[-1], getattr(mixer, f"x_proj{end}").weight
        rank = len(weight) - 2 * n
        rows += every_row(mixer, f"A{end}_log", f"dt_proj{end}")
        without_b: list[StateRows] = [(weight, slice(0, rank)), (weight, slice(rank + n, None))]
        rows += without_b if which == "AC-direct" else [(weight, None)]
        if which == "ABC-full":
            rows += every_row(mixer, f"conv1d{end}" if hasattr(mixer, "conv1d") else "conv1d_x")
    norms = _norms(mixer)
    rows += [
        row for norm in (norms[::2] if which == "AC-direct" else norms) if norm is not None for row in rows_of(norm)
    ]
    if which == "ABC-full":
        rows += rows_of(mixer.in_proj, slice(0, len(mixer.in_proj.weight) // 2))
    if not hasattr(mixer, "x_proj_b"):  # the fork's type "v1" has a second transition alone
        rows += every_row(mixer, "A_b_log")
    return rows


@register_probe("mamba_ssm.modules.mamba_simple.Mamba", parameters=parameters)
def mamba_ssm(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of the forward scan and, for bidirectional layers, of the backward scan (in token order)."""
    x = _x(mixer, mamba_ssm_input(inputs, "hidden_states"))
    scans = [_scan(mixer, convolve(mixer.conv1d, x))]
    if hasattr(mixer, "x_proj_b"):
        scans.append(_scan(mixer, convolve(mixer.conv1d_b, x, reverse=True), "_b"))
    elif hasattr(mixer, "A_b_log"):  # type "v1": one set of projections, two transitions
        scans.append(scans[0]._replace(A=-torch.exp(at_least_float32(mixer.A_b_log))))
    return [state_space(scan, inputs.options) for scan in scans]


@register_probe("mambapy.mamba.MambaBlock", parameters=parameters)
def mambapy(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one forward scan."""
    return [state_space(_scan(mixer, convolve(mixer.conv1d, _x(mixer, inputs.get(0, "x")))), inputs.options)]


def transformers_scan(mixer: Any, x: Tensor, mask: Tensor | None, seq_idx: Tensor | None) -> ScanInputs:
    """The inputs of the mixer's scan, from the convolution's input x: [batch, tokens, channels]."""
    u = masked(convolve(mixer.conv1d, x, act=activation(mixer), seq_idx=seq_idx), mask)
    return _scan(mixer, u)._replace(seq_idx=seq_idx)


@register_probe(
    "transformers.models.mamba.modeling_mamba.MambaMixer",
    "transformers.models.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer",
    "transformers.models.jamba.modeling_jamba.JambaMambaMixer",
    parameters=parameters,
)
def transformers(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one forward scan."""
    hidden, mask, seq_idx = transformers_input(mixer, inputs)
    return [state_space(transformers_scan(mixer, _x(mixer, hidden), mask, seq_idx), inputs.options, mask=mask)]


def zamba_parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states; heads share tensors, so no set cuts the projections into rows."""
    rows = every_row(mixer, "A_log", "dt_proj_weight", "dt_proj_bias", "x_proj_weight")
    return rows + every_row(mixer, "conv1d", "in_proj") if which == "ABC-full" else rows


@register_probe("transformers.models.zamba.modeling_zamba.ZambaMambaMixer", parameters=zamba_parameters)
def zamba(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States with the heads as groups: a, b, c: [batch, tokens, heads, n]."""
    hidden, mask, seq_idx = transformers_input(mixer, inputs)
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


def same_convolution(conv: Any, x: Tensor) -> Tensor:
    """A depthwise convolution that sees both sides, then SiLU: [batch, tokens, channels]."""
    bias = None if conv.bias is None else at_least_float32(conv.bias)
    weight = at_least_float32(conv.weight)
    return F.silu(F.conv1d(x.transpose(1, 2), weight, bias, padding="same", groups=len(weight))).transpose(1, 2)


def mambavision_scan(mixer: Any, x: Tensor) -> ScanInputs:
    """The inputs of MambaVision's scan of one half of the channels; x: [batch, tokens, channels], before convolving."""
    inputs = _scan(mixer, same_convolution(mixer.conv1d_x, x))
    assert inputs.delta_bias is not None
    # dt_proj adds its bias and the scan adds it again; weights were trained like that.
    return inputs._replace(delta_bias=2 * inputs.delta_bias)


# The file comes from pip, or with weights from Hugging Face under a name that is made for it.
@register_probe("*mamba_vision.MambaVisionMixer", "*modeling_mambavision.MambaVisionMixer", parameters=parameters)
def mambavision(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one scan: a, b, c: [batch, tokens, n]."""
    return [state_space(mambavision_scan(mixer, _x(mixer, inputs.get(0, "hidden_states"))), inputs.options)]
