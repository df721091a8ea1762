"""Probes of Kimi delta attention, a delta rule with a decay per channel: transformers' KimiLinear, GLM-5-next, Bailing.

A value channel s of a head's memory follows `s <- (I - k e^T) diag(alpha) s + write v`, `o = q . s`, with e = beta k
and write = beta k. The transition is diagonal plus rank one, `diag(alpha) - k (alpha e)^T`, and needs no eigenvalues.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ssm.probe import MixerInputs, as_mask, check_options, register_probe
from infssm.ssm.probes.gated_delta import unit
from infssm.ssm.probes.selective import convolve, every_row, project, transformers_input
from infssm.ssm.space import StateSpace


def delta_rule(
    q: Tensor, k: Tensor, alpha: Tensor, erase: Tensor, write: Tensor, mask: Tensor | None = None
) -> StateSpace:
    """The systems of tokens; all tensors [..., d]: `A = (I - k erase^T) diag(alpha)`, b = write, c = q."""
    return StateSpace(alpha, q, write, mask, u=-k.unsqueeze(-2), v=(erase * alpha).unsqueeze(-2))


def parameters(mixer: Any, which: str) -> list[StateRows]:  # noqa: ARG001 - A, B and C are made of the same ones
    """Parameters that form the states: the same for all sets."""
    rows = every_row(mixer, "q_proj", "k_proj", "b_proj", "forget_gate")
    return [(mixer.conv1d.weight, slice(0, 2 * mixer.qkv_dim)), *rows]


@register_probe(
    "transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention",
    "transformers.models.glm5_next.modeling_glm5_next.Glm5NextTextLinearAttention",
    "transformers.models.bailing_hybrid.modeling_bailing_hybrid.BailingHybridDeltaAttention",
    parameters=parameters,
    exact=True,
)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """head_dim states per head, diagonal plus rank one: a, b, c: [batch, tokens, heads, head_dim]."""
    check_options(inputs, "Kimi delta attention")
    hidden, mask, seq_idx = transformers_input(mixer, inputs)
    qk = torch.cat([project(mixer.q_proj, hidden), project(mixer.k_proj, hidden)], dim=-1)
    qk = convolve(mixer.conv1d, qk, rows=slice(0, 2 * mixer.qkv_dim), act=mixer.activation, seq_idx=seq_idx)
    q, k = (unit(torch.unflatten(part, -1, (-1, mixer.head_dim))) for part in qk.chunk(2, dim=-1))
    alpha = torch.exp(at_least_float32(mixer.forget_gate(hidden)))
    strength = project(mixer.b_proj, hidden).sigmoid().unsqueeze(-1) * k
    return [delta_rule(q / mixer.head_dim**0.5, k, alpha, strength, strength, as_mask(mask))]
