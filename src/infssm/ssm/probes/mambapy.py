"""Probe of mambapy's MambaBlock."""

from __future__ import annotations

from typing import Any

from infssm.models import StateRows
from infssm.ssm.probe import MixerInputs, register_probe
from infssm.ssm.probes.selective import convolve, project, selective_inputs, selective_parameters, state_space
from infssm.ssm.space import StateSpace


def _norms(mixer: Any) -> tuple[Any, Any, Any]:
    return mixer.dt_layernorm, mixer.B_layernorm, mixer.C_layernorm


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states."""
    direction = (mixer.conv1d, mixer.x_proj, mixer.dt_proj, mixer.A_log)
    return selective_parameters(which, in_proj=mixer.in_proj, directions=[direction], norms=_norms(mixer))


@register_probe("mambapy.mamba.MambaBlock", parameters=parameters)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """States of one forward scan."""
    x = project(mixer.in_proj, inputs.get(0, "x"), slice(0, mixer.A_log.shape[0]))
    u = convolve(mixer.conv1d, x)
    scan = selective_inputs(u, mixer.x_proj, mixer.dt_proj, mixer.A_log, norms=_norms(mixer))
    return [state_space(scan, inputs.options)]
