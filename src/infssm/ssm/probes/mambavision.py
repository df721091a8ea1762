"""Probe of MambaVision's mixer: Mamba's scan of one half of the channels, the other half is passed beside it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ops import ScanInputs
from infssm.ssm.probe import MixerInputs, register_probe
from infssm.ssm.probes.selective import project, selective_inputs, selective_parameters, state_space
from infssm.ssm.space import StateSpace


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states."""
    direction = (mixer.conv1d_x, mixer.x_proj, mixer.dt_proj, mixer.A_log)
    return selective_parameters(which, in_proj=mixer.in_proj, directions=[direction])


def same_convolution(conv: Any, x: Tensor) -> Tensor:
    """A depthwise convolution that sees both sides, then SiLU: [batch, tokens, channels]."""
    bias = None if conv.bias is None else at_least_float32(conv.bias)
    weight = at_least_float32(conv.weight)
    return F.silu(F.conv1d(x.transpose(1, 2), weight, bias, padding="same", groups=len(weight))).transpose(1, 2)


def scan_inputs(mixer: Any, x: Tensor) -> ScanInputs:
    """The inputs of the mixer's scan; x: [batch, tokens, channels], before the convolution."""
    inputs = selective_inputs(same_convolution(mixer.conv1d_x, x), mixer.x_proj, mixer.dt_proj, mixer.A_log)
    assert inputs.delta_bias is not None
    # dt_proj adds its bias and the scan adds it again; weights were trained like that.
    return inputs._replace(delta_bias=2 * inputs.delta_bias)


# The file comes from pip, or with weights from Hugging Face under a name that is made for it.
@register_probe("*mamba_vision.MambaVisionMixer", parameters=parameters)
@register_probe("*modeling_mambavision.MambaVisionMixer", parameters=parameters)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one scan: a, b, c: [batch, tokens, n]."""
    x = project(mixer.in_proj, inputs.get(0, "hidden_states"), slice(0, mixer.A_log.shape[0]))
    return [state_space(scan_inputs(mixer, x), inputs.options)]
