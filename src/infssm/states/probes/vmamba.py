"""Probe of VMamba's official SS2D: four scans over an image, each with its own projections."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from infssm.errors import ConfigError
from infssm.geometry import StateSpace
from infssm.models import StateRows
from infssm.states._probe import MixerInputs, register_probe
from infssm.states.probes._selective import SelectiveInputs, state_space, wide


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states; directions share tensors, so no set cuts the projections into rows."""
    rows: list[StateRows] = [
        (p, None) for p in (mixer.A_logs, mixer.dt_projs_weight, mixer.dt_projs_bias, mixer.x_proj_weight)
    ]
    if which == "ABC-full":
        if (conv := getattr(mixer, "conv2d", None)) is not None:
            rows += [(p, None) for p in (conv.weight, conv.bias) if p is not None]
        width = mixer.dt_projs_weight.shape[1]
        rows += [(p, slice(0, width)) for p in (mixer.in_proj.weight, mixer.in_proj.bias) if p is not None]
    return rows


# The file lies in `classification/models`, which people put on their path in many ways.
@register_probe("*vmamba.SS2D", parameters=parameters)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of the four directions, each a, b, c: [batch, height * width, n] with the pixels in raster order."""
    core = getattr(mixer, "forward_core", None)
    if not hasattr(mixer, "x_proj_weight") or getattr(core, "keywords", {}).get("scan_mode") == "cascade2d":
        raise ConfigError("of VMamba's SS2D only forward types v0 to v5 with independent scans are known")
    u = _features(mixer, inputs.get(0, "x"))
    directions, _, rank = mixer.dt_projs_weight.shape
    n = mixer.A_logs.shape[-1]
    projected = torch.einsum("btd,kcd->kbtc", u, wide(mixer.x_proj_weight))
    if (bias := getattr(mixer, "x_proj_bias", None)) is not None:
        projected = projected + wide(bias).view(directions, 1, 1, -1)
    dt, B, C = torch.split(projected, [rank, n, n], dim=-1)
    delta = torch.einsum("kbtr,kdr->kbtd", dt, wide(mixer.dt_projs_weight))
    A = -torch.exp(wide(mixer.A_logs)).view(directions, -1, n)
    dt_bias = wide(mixer.dt_projs_bias).view(directions, -1)
    scans = (SelectiveInputs(u, delta[k], A[k], B[k], C[k], dt_bias[k]) for k in range(directions))
    return [state_space(scan, inputs.options) for scan in scans]


def _features(mixer: Any, x: torch.Tensor) -> torch.Tensor:
    """Input of the scans: [batch, pixels, channels]; x: [batch, height, width, c], or channels first."""
    channel_first = getattr(mixer, "channel_first", False)
    if channel_first:
        x = x.permute(0, 2, 3, 1)
    width = mixer.dt_projs_weight.shape[1]
    bias = None if mixer.in_proj.bias is None else wide(mixer.in_proj.bias[:width])
    # Linear2d of channels-first models keeps its weight as a Linear does.
    y = F.linear(wide(x), wide(mixer.in_proj.weight[:width]), bias).permute(0, 3, 1, 2)
    if (conv := getattr(mixer, "conv2d", None)) is not None:
        bias = None if conv.bias is None else wide(conv.bias)
        y = F.conv2d(y, wide(conv.weight), bias, padding=conv.padding, groups=conv.groups)
    return mixer.act(y).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]
