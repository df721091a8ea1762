"""Probes of linear attention with a normaliser: RWKV-4 and xLSTM's mLSTM.

The output is the quotient of a numerator, driven by the values, and a normaliser, driven by ones. Both follow the same
A, B and C: the one system recorded here holds the two, and with them their quotient.
"""

from __future__ import annotations

from typing import Any

import torch

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ssm.probe import MixerInputs, check_options, refuse_generation, register_probe
from infssm.ssm.probes.selective import every_row, project
from infssm.ssm.space import StateSpace


def rwkv4_parameters(mixer: Any, which: str) -> list[StateRows]:
    """Parameters that form the states; the output row is constant, so "AC-direct" has only the decay."""
    names = () if which == "AC-direct" else ("time_first", "time_mix_key", "key")
    return every_row(mixer, "time_decay", *names)


@register_probe("transformers.models.rwkv.modeling_rwkv.RwkvSelfAttention", parameters=rwkv4_parameters, exact=True)
def rwkv4(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """Two states per channel for numerator and normaliser, diagonal plus rank one: [batch, tokens, channels, 2].

    A token's output reads the memory before the token is added to it, and the token itself with a bonus. So beside the
    memory m there is the value p that is read: `m <- w m + e^k v`, `p = m before + e^(bonus + k) v`.
    """
    check_options(inputs, "RWKV-4")
    hidden = at_least_float32(inputs.get(0, "hidden"))
    refuse_generation(inputs.get(1, "state") is not None and hidden.shape[1] == 1)
    mix = at_least_float32(mixer.time_mix_key)
    key = project(mixer.key, hidden * mix + mixer.time_shift(hidden) * (1 - mix))
    decay = torch.exp(-torch.exp(at_least_float32(mixer.time_decay))).expand(key.shape)
    zero, one = torch.zeros_like(key), torch.ones_like(key)
    b = torch.stack([torch.exp(key), torch.exp(key + at_least_float32(mixer.time_first))], dim=-1)
    a, c, u, v = (torch.stack(pair, dim=-1) for pair in ((decay, zero), (zero, one), (zero, one), (one, zero)))
    return [StateSpace(a, c, b, u=u.unsqueeze(-2), v=v.unsqueeze(-2))]


def mlstm_parameters(mixer: Any, which: str) -> list[StateRows]:  # noqa: ARG001 - the sets share their layers
    """Parameters that form the states: those of q, k and the two gates."""
    if mixer.config.weight_mode == "fused":
        rows: list[StateRows] = [(p, slice(0, 2 * mixer.qk_dim)) for p in mixer.qkv_opreact.parameters()]
        return rows + every_row(mixer, "ifgate_preact")
    return every_row(mixer, "q", "k", "igate_preact", "fgate_preact")


@register_probe("transformers.models.xlstm.modeling_xlstm.xLSTMLayer", parameters=mlstm_parameters, exact=True)
def mlstm(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """One pole per head for numerator and normaliser: a: [batch, tokens, heads, 1]; b, c: [..., heads, head_dim]."""
    check_options(inputs, "mLSTM")
    x = inputs.get(0, "x")
    refuse_generation(inputs.get(1, "state") is not None and x.shape[1] == 1)
    heads, cap = mixer.config.num_heads, mixer.config.gate_soft_cap
    if mixer.config.weight_mode == "fused":
        q, k = project(mixer.qkv_opreact, x, slice(0, 2 * mixer.qk_dim)).chunk(2, dim=-1)
        i, f = project(mixer.ifgate_preact, x).chunk(2, dim=-1)
    else:
        q, k, i, f = (project(layer, x) for layer in (mixer.q, mixer.k, mixer.igate_preact, mixer.fgate_preact))
    i, f = (gate if cap is None else cap * torch.tanh(gate / cap) for gate in (i, f))
    q, k = (torch.unflatten(part, -1, (heads, -1)) for part in (q, k))
    return [StateSpace(f.sigmoid().unsqueeze(-1), q / q.shape[-1] ** 0.5, torch.exp(i).unsqueeze(-1) * k)]
