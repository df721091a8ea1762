"""Probe of RecurrentGemma's RG-LRU: every channel is a system of one state, h <- a h + sqrt(1 - a^2) i x."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ssm.probe import MixerInputs, check_options, refuse_generation, register_probe
from infssm.ssm.probes.selective import every_row
from infssm.ssm.space import StateSpace


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states; c is 1, so "AC-direct" has only those of the transition."""
    names = () if which == "AC-direct" else ("input_gate_weight", "input_gate_bias")
    return every_row(mixer, "recurrent_param", "recurrent_gate_weight", "recurrent_gate_bias", *names)


@register_probe(
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru",
    parameters=parameters,
    exact=True,
)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """One state per channel: a, b, c: [batch, tokens, channels, 1]."""
    check_options(inputs, "RG-LRU")
    x, positions = at_least_float32(inputs.get(0, "activations")), inputs.get(1, "position_ids")
    refuse_generation(x.shape[1] == 1 and bool((positions > 0).all()))
    # -8 is fixed in the layer, too.
    log_a = -8.0 * _gate(mixer, "recurrent", x) * F.softplus(at_least_float32(mixer.recurrent_param))
    # The gradient of the square root is infinite at a = 1; the layer clips it as well.
    scale = (-torch.expm1(2 * log_a)).clamp_min(torch.finfo(x.dtype).tiny).sqrt()
    first = (positions == 0).unsqueeze(-1)  # where a sequence begins, the state is dropped and the input not scaled
    a, scale = log_a.exp().masked_fill(first, 0), scale.masked_fill(first, 1)
    b = scale * _gate(mixer, "input", x)
    return [StateSpace(a, torch.ones_like(b), b).map(lambda tensor: tensor.unsqueeze(-1))]


def _gate(mixer: Any, name: str, x: Tensor) -> Tensor:
    """One of the two gates, whose weights are blocks of channels: [batch, tokens, channels]."""
    weight, bias = (at_least_float32(getattr(mixer, f"{name}_gate_{part}")) for part in ("weight", "bias"))
    blocks = torch.unflatten(x, -1, weight.shape[:2])
    return torch.sigmoid(torch.einsum("bthi,hij->bthj", blocks, weight) + bias).flatten(2)
