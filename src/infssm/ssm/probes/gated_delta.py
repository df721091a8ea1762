"""Probes of the gated delta rule: transformers' Qwen3-Next, Qwen3.5, Qwen4-exp and OLMo-hybrid.

Per head, with decay alpha and write strength beta, a value channel s of the memory follows `s <- A s + k beta v`,
`o = q . s` with `A = alpha (I - beta k k^T)`. A acts as alpha on all that is orthogonal to k, and k is an eigenvector
of A with eigenvalue `alpha (1 - beta |k|^2)`: whatever the size of k, the system that a token holds fixed has two
states, in the orthonormal coordinates along q's part orthogonal to k, and along k.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ssm.probe import MixerInputs, as_mask, register_probe
from infssm.ssm.probes.selective import convolve, every_row, project, transformers_input
from infssm.ssm.space import StateSpace


def unit(x: Tensor) -> Tensor:
    """x: [..., d] of unit length, as in transformers' and fla's l2norm of queries and keys."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def two_states(q: Tensor, k: Tensor, alpha: Tensor, beta: Tensor, mask: Tensor | None = None) -> StateSpace:
    """The two-state systems [..., 2] of tokens. q, k: [..., d], as the rule uses them; alpha, beta: [...]."""
    square = k.square().sum(-1)
    length = square.clamp_min(torch.finfo(k.dtype).tiny).sqrt()
    along = (q * k).sum(-1) / length
    across = q - (along / length).unsqueeze(-1) * k
    beside = across.square().sum(-1).clamp_min(torch.finfo(k.dtype).tiny).sqrt()
    a = torch.stack([alpha, alpha * (1 - beta * square)], dim=-1)
    return StateSpace(
        a, torch.stack([beside, along], dim=-1), torch.stack([torch.zeros_like(beta), beta * length], dim=-1), mask
    )


def _projections(mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k side by side before the convolution [batch, tokens, 2 key_dim], b and a [batch, tokens, heads]."""
    if hasattr(mixer, "in_proj_qkvz"):  # Qwen3-Next: all of a key head's rows together
        both = project(mixer.in_proj_qkvz, hidden), project(mixer.in_proj_ba, hidden)
        q, k, _, _, b, a = mixer.fix_query_key_value_ordering(*both)
        return torch.cat([q.flatten(2), k.flatten(2)], dim=-1), b, a
    if hasattr(mixer, "in_proj_qkv"):  # Qwen3.5
        qk = project(mixer.in_proj_qkv, hidden, slice(0, 2 * mixer.key_dim))
        return qk, project(mixer.in_proj_b, hidden), project(mixer.in_proj_a, hidden)
    qk = torch.cat([project(mixer.q_proj, hidden), project(mixer.k_proj, hidden)], dim=-1)
    return qk, project(mixer.b_proj, hidden), project(mixer.a_proj, hidden)


def parameters(mixer: Any, which: str) -> list[StateRows]:  # noqa: ARG001 - A, B and C are made of the same ones
    """Parameters that form the states: the same for all sets, for A, B and C all come from k, q, alpha and beta."""
    qk = slice(0, 2 * mixer.key_dim)
    rows = [*every_row(mixer, "A_log", "dt_bias"), (mixer.conv1d.weight, qk)]
    if hasattr(mixer, "in_proj_qkvz"):
        step = len(mixer.in_proj_qkvz.weight) // mixer.num_k_heads
        starts = range(0, step * mixer.num_k_heads, step)
        rows += [(mixer.in_proj_qkvz.weight, slice(first, first + 2 * mixer.head_k_dim)) for first in starts]
        return rows + every_row(mixer, "in_proj_ba")
    if hasattr(mixer, "in_proj_qkv"):
        return [*rows, (mixer.in_proj_qkv.weight, qk), *every_row(mixer, "in_proj_b", "in_proj_a")]
    return rows + every_row(mixer, "q_proj", "k_proj", "b_proj", "a_proj")


@register_probe(
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet",
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    "transformers.models.qwen4_exp.modeling_qwen4_exp.Qwen4ExpTextGatedDeltaNet",
    "transformers.models.olmo_hybrid.modeling_olmo_hybrid.OlmoHybridGatedDeltaNet",
    parameters=parameters,
    exact=True,
)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """Two states per head: a, b, c: [batch, tokens, heads, 2]."""
    if inputs.options.b_mode != "raw":
        raise ConfigError(
            f"the gated delta rule has no step size for b_mode={inputs.options.b_mode!r}; use b_mode='raw'"
        )
    hidden, mask, seq_idx = transformers_input(mixer, inputs)
    qk, b, a = _projections(mixer, hidden)
    qk = convolve(mixer.conv1d, qk, rows=slice(0, 2 * mixer.key_dim), act=mixer.activation, seq_idx=seq_idx)
    q, k = (torch.unflatten(part, -1, (-1, mixer.head_k_dim)) for part in qk.chunk(2, dim=-1))
    shared = mixer.num_v_heads // mixer.num_k_heads
    q, k = (unit(x).repeat_interleave(shared, dim=2) for x in (q, k))
    beta = b.sigmoid() * (2 if getattr(mixer, "allow_neg_eigval", False) else 1)
    bias = at_least_float32(mixer.dt_bias) if inputs.options.include_dt_bias else 0
    alpha = torch.exp(-at_least_float32(mixer.A_log).exp() * F.softplus(a + bias))
    return [two_states(q / mixer.head_k_dim**0.5, k, alpha, beta, as_mask(mask))]
