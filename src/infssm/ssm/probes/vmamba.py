"""Probe of VMamba's official SS2D: four scans over an image, each with its own projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ops import ScanInputs
from infssm.ssm.probe import MixerInputs, register_probe
from infssm.ssm.probes.selective import every_row, rows_of, state_space
from infssm.ssm.space import StateSpace

DIRECTIONS = 4


class Projections(NamedTuple):
    """x_weight: [4 (rank + 2 n), channels]; x_bias: [4 (rank + 2 n)]; dt_weight: [4 channels, rank], or 3-d views."""

    x_weight: Tensor
    x_bias: Tensor | None
    dt_weight: Tensor


def _projections(mixer: Any) -> Projections:
    """The four directions' projections: parameters of the mixer, or of grouped layers in the one-file version."""
    core = getattr(mixer, "forward_core", None)
    if getattr(core, "keywords", {}).get("scan_mode") != "cascade2d":
        if hasattr(mixer, "x_proj_weight"):
            return Projections(mixer.x_proj_weight, getattr(mixer, "x_proj_bias", None), mixer.dt_projs_weight)
        if hasattr(mixer, "x_proj") and hasattr(mixer, "dt_projs"):
            return Projections(mixer.x_proj.weight, mixer.x_proj.bias, mixer.dt_projs.weight)
    raise ConfigError("of VMamba's SS2D only forward types v0 to v5 with independent scans are known")


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states; directions share tensors, so no set cuts the projections into rows."""
    rows: list[StateRows] = [*every_row(mixer, "A_logs", "dt_projs_bias")]
    rows += [(p, None) for p in _projections(mixer) if p is not None]
    if which == "ABC-full":
        rows += every_row(mixer, "conv2d") + rows_of(mixer.in_proj, slice(0, len(mixer.A_logs) // DIRECTIONS))
    return rows


# The file lies in `classification/models`, which people put on their path in many ways.
@register_probe("*vmamba.SS2D", parameters=parameters)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of the four directions, each a, b, c: [batch, height * width, n] with the pixels in raster order."""
    x_weight, x_bias, dt_weight = _projections(mixer)
    channels, n = len(mixer.A_logs) // DIRECTIONS, mixer.A_logs.shape[-1]
    u = _features(mixer, inputs.get(0, "x"), channels)
    projected = torch.einsum("btd,kcd->kbtc", u, at_least_float32(x_weight).view(DIRECTIONS, -1, channels))
    if x_bias is not None:
        projected = projected + at_least_float32(x_bias).view(DIRECTIONS, 1, 1, -1)
    dt, B, C = torch.split(projected, [projected.shape[-1] - 2 * n, n, n], dim=-1)
    delta = torch.einsum("kbtr,kdr->kbtd", dt, at_least_float32(dt_weight).view(DIRECTIONS, channels, -1))
    A = -torch.exp(at_least_float32(mixer.A_logs)).view(DIRECTIONS, channels, n)
    dt_bias = at_least_float32(mixer.dt_projs_bias).view(DIRECTIONS, channels)
    scans = (ScanInputs(u, delta[k], A[k], B[k], C[k], delta_bias=dt_bias[k]) for k in range(DIRECTIONS))
    return [state_space(scan._replace(delta_softplus=True), inputs.options) for scan in scans]


def _features(mixer: Any, x: Tensor, width: int) -> Tensor:
    """Input of the scans: [batch, pixels, channels]; x: [batch, height, width, c], or channels first."""
    channel_first = getattr(mixer, "channel_first", False)
    if channel_first:
        x = x.permute(0, 2, 3, 1)
    bias = None if mixer.in_proj.bias is None else at_least_float32(mixer.in_proj.bias[:width])
    # Linear2d of channels-first models keeps its weight as a Linear does.
    y = F.linear(at_least_float32(x), at_least_float32(mixer.in_proj.weight[:width]), bias).permute(0, 3, 1, 2)
    if (conv := getattr(mixer, "conv2d", None)) is not None:
        bias = None if conv.bias is None else at_least_float32(conv.bias)
        y = F.conv2d(y, at_least_float32(conv.weight), bias, padding=conv.padding, groups=conv.groups)
    return mixer.act(y).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]
