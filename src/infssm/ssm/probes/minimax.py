"""Probe of MiniMax's lightning attention: s <- gamma s + k v, o = q . s, with a decay gamma that is fixed per head."""

from __future__ import annotations

from typing import Any

import torch

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ssm.probe import MixerInputs, as_mask, check_options, refuse_generation, register_probe
from infssm.ssm.probes.selective import masked, project
from infssm.ssm.space import StateSpace


def parameters(mixer: Any, which: str) -> list[StateRows]:
    """Rows of the projection that form q and k (the decay is no parameter), head by head."""
    d = mixer.head_dim
    width = d if which == "AC-direct" else 2 * d
    starts = range(0, 3 * d * mixer.num_attention_heads, 3 * d)
    return [(mixer.qkv_proj.weight, slice(start, start + width)) for start in starts]


@register_probe(
    "transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention", parameters=parameters, exact=True
)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """One fixed pole per head: a: [batch, tokens, heads, 1]; b, c: [batch, tokens, heads, head_dim]."""
    check_options(inputs, "lightning attention")
    hidden, mask = inputs.get(0, "hidden_states"), inputs.get(2, "attention_mask")
    cache = inputs.get(3, "past_key_values")
    refuse_generation(cache is not None and cache.get_linear_cache(mixer.layer_idx) is not None)
    qkv = masked(mixer.act_fn(project(mixer.qkv_proj, hidden)), mask)
    q, k, _ = torch.unflatten(qkv, -1, (mixer.num_attention_heads, -1)).chunk(3, dim=-1)
    gamma = torch.exp(-at_least_float32(mixer.slope_rate)).view(-1, 1)
    return [StateSpace(gamma.expand(*q.shape[:-1], 1).to(q.dtype), q, k, as_mask(mask))]
