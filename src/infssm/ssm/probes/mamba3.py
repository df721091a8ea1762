"""Probe of Mamba-3 (mamba_ssm and fla): a scalar decay, states that turn, and a trapezoidal rule for the input.

`S <- alpha S + (1 - lam) step alpha k' v' + lam step k v` with k' v' of the token before, q and k rotated by angles
that grow. With a token's values held, the response is `step q (alpha R)^j k` but for j = 0, where it lacks
`(1 - lam) step q.k`: a pole at 0.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ssm.probe import MixerInputs, as_mask, refuse_generation, register_probe
from infssm.ssm.probes.rotary import rotated
from infssm.ssm.probes.selective import every_row, project, rows_of
from infssm.ssm.space import StateSpace


class Sizes(NamedTuple):
    """Channels, heads, groups of heads that share B and C, and states."""

    inner: int
    heads: int
    groups: int
    n: int


def _sizes(mixer: Any) -> Sizes:
    if hasattr(mixer, "num_bc_heads"):  # mamba_ssm
        return Sizes(mixer.d_inner, mixer.nheads, mixer.num_bc_heads, mixer.d_state)
    return Sizes(mixer.intermediate_size, mixer.num_heads, mixer.n_groups, mixer.ssm_state_size)


def _decay_rate(mixer: Any, x: Tensor) -> Tensor:
    """Rate of a head's decay: softplus in mamba_ssm to 2.3.2 and in fla, later mamba_ssm has its own function."""
    modules = (sys.modules.get(cls.__module__) for cls in type(mixer).__mro__)
    own = (getattr(module, "heavy_tail_activation", None) for module in modules)
    return next(filter(None, own), F.softplus)(x)


def parameters(mixer: Any, which: str) -> list[StateRows]:  # noqa: ARG001 - step size and angles are in A, B and C
    """Parameters that form the states: all rows of in_proj after z and x, biases and norms of B and C."""
    after = slice(2 * _sizes(mixer).inner, None)
    rows = rows_of(mixer.in_proj, after)
    return rows + every_row(mixer, "dt_bias", "B_bias", "C_bias", "B_norm", "C_norm")


@register_probe("mamba_ssm.modules.mamba3.Mamba3", "fla.layers.mamba3.Mamba3", parameters=parameters, exact=True)
def probe(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """Complex poles for pairs of channels that turn, and two real ones: [batch, tokens, heads(, rank^2), n].

    The ranks of a layer with several inputs and outputs (MIMO) write into one memory and all read from it, so there is
    a system for every pair of a query's rank and a key's rank, the query's first.
    """
    if inputs.options.b_mode != "raw" or not inputs.options.include_dt_bias:
        raise ConfigError("Mamba-3 records its own discretisation; use b_mode='raw' and include_dt_bias=True")
    cache = inputs.kwargs.get("inference_params")
    refuse_generation(cache is not None and cache.seqlen_offset > 0)
    hidden: Any = inputs.args[0] if inputs.args else inputs.kwargs.get("u", inputs.kwargs.get("hidden_states"))
    inner, heads, groups, n = _sizes(mixer)
    rank = mixer.mimo_rank if mixer.is_mimo else 1
    sizes = [groups * n * rank, groups * n * rank, heads, heads, heads, mixer.num_rope_angles]
    projected = project(mixer.in_proj, hidden, slice(2 * inner, None))
    B, C, dt, rate, trap, angles = torch.split(projected, sizes, dim=-1)
    step = F.softplus(dt + at_least_float32(mixer.dt_bias))
    alpha = torch.exp(-_decay_rate(mixer, rate).clamp_min(mixer.A_floor) * step)
    k = _keys(mixer.B_norm, B, mixer.B_bias, rank, groups)
    q = _keys(mixer.C_norm, C, mixer.C_bias, rank, groups)
    q, k = q.repeat_interleave(rank, dim=-2), torch.cat([k] * rank, dim=-2)  # [batch, tokens, heads, rank^2, n]
    step, alpha, lam = (x[..., None, None] for x in (step, alpha, trap.sigmoid()))  # [batch, tokens, heads, 1, 1]
    turn = math.pi * step * torch.tanh(angles)[..., None, None, :]
    pairs = mixer.num_rope_angles
    if mixer.is_mimo:  # pairs are halves of a head's channels
        (q0, q1), (k0, k1) = ((x[..., : n // 2], x[..., n // 2 :]) for x in (q, k))
        q0, q1, k0, k1 = (x[..., :pairs] for x in (q0, q1, k0, k1))
    else:
        (q0, q1), (k0, k1) = ((x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]) for x in (q, k))
    direct = (q * k).sum(-1, keepdim=True)
    rest = direct - (q0 * k0 + q1 * k1).sum(-1, keepdim=True)
    poles = torch.cat([alpha, torch.zeros_like(alpha)], dim=-1).expand(*rest.shape[:-1], 2)
    residues = torch.cat([step * rest, -(1 - lam) * step * direct], dim=-1)
    mask = as_mask(inputs.get(1, "attention_mask") if hasattr(mixer, "n_groups") else None)  # fla's layer has one
    space = rotated(alpha, turn, (q0, q1), (step * k0, step * k1), mask, extra=(poles, residues))
    return [space if mixer.is_mimo else space.map(lambda x: x.squeeze(-2))]


def _keys(norm: Any, x: Tensor, bias: Tensor, rank: int, groups: int) -> Tensor:
    """B or C of every head: [batch, tokens, heads, rank, n]."""
    normed = at_least_float32(norm(torch.unflatten(x, -1, (rank, groups, -1)).to(norm.weight.dtype)))
    return normed.repeat_interleave(bias.shape[0] // groups, dim=-2).transpose(-3, -2) + at_least_float32(bias)
