"""Probes of flash-linear-attention's layers: delta rules and linear attention, by class name.

Every head keeps a memory of d keys; one of its value channels is a system with as many states. Layers with a scalar
decay and a delta rule have an equal system of two states (`gated_delta.py`), the others are diagonal or diagonal plus
rank one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.models import StateRows
from infssm.models.mixer import at_least_float32
from infssm.ssm.probe import MixerInputs, ProbeFn, as_mask, check_options, refuse_generation, register_probe
from infssm.ssm.probes.gated_delta import two_states, unit
from infssm.ssm.probes.kimi_delta import delta_rule
from infssm.ssm.probes.rotary import rotated
from infssm.ssm.probes.selective import convolve, every_row, masked, packing, project
from infssm.ssm.space import StateSpace

_LIMIT = 1 - 1e-6
"""Largest pole of a layer without decay, whose own is 1: the distances of subspaces need one inside the unit disc."""


def fla_probe(name: str, *modules: str) -> Callable[[ProbeFn], ProbeFn]:
    """Register an exact probe of ``fla.layers.<name>``; modules: layers and parameters that form its states."""

    def parameters(mixer: Any, which: str) -> list[StateRows]:  # noqa: ARG001 - A, B and C are made of the same ones
        return every_row(mixer, *modules)

    return register_probe(f"fla.layers.{name}", parameters=parameters, exact=True)


def _inputs(inputs: MixerInputs, layer: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Hidden states [batch, tokens, width], mask and packing of a layer's call."""
    check_options(inputs, layer)
    hidden, mask = inputs.get(0, "hidden_states"), inputs.get(1, "attention_mask")
    cache = inputs.get(2, "past_key_values")
    refuse_generation(cache is not None and cache.get_seq_length() > 0)
    return masked(hidden, mask), mask, packing(hidden, inputs.kwargs)


def _short(mixer: Any, name: str, hidden: Tensor, seq_idx: Tensor | None, act: Callable[[Tensor], Tensor]) -> Tensor:
    """A projection and its short convolution [batch, tokens, channels]; without the convolution, the activation."""
    x = project(getattr(mixer, f"{name}_proj"), hidden)
    if not mixer.use_short_conv:
        return act(x)
    conv = getattr(mixer, f"{name}_conv1d")
    return convolve(conv, x, act="silu" if conv.activation in ("silu", "swish") else _identity, seq_idx=seq_idx)


def _identity(x: Tensor) -> Tensor:
    return x


def _heads(x: Tensor, d: int, times: int = 1) -> Tensor:
    """[batch, tokens, heads d] -> [batch, tokens, heads times, d]."""
    return torch.unflatten(x, -1, (-1, d)).repeat_interleave(times, dim=2)


@fla_probe(
    "gated_deltanet.GatedDeltaNet", "q_proj", "k_proj", "q_conv1d", "k_conv1d", "a_proj", "b_proj", "A_log", "dt_bias"
)
def gated_delta_net(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """Two states per head: a, b, c: [batch, tokens, heads, 2]."""
    hidden, mask, seq_idx = _inputs(inputs, "GatedDeltaNet")
    shared = mixer.num_v_heads // mixer.num_heads
    q, k = (unit(_heads(_short(mixer, x, hidden, seq_idx, F.silu), mixer.head_k_dim, shared)) for x in "qk")
    beta = project(mixer.b_proj, hidden).sigmoid() * (2 if mixer.allow_neg_eigval else 1)
    rate = F.softplus(project(mixer.a_proj, hidden) + at_least_float32(mixer.dt_bias))
    alpha = torch.exp(-at_least_float32(mixer.A_log).exp() * rate)
    return [two_states(q / mixer.head_k_dim**0.5, k, alpha, beta, as_mask(mask))]


@fla_probe("delta_net.DeltaNet", "q_proj", "k_proj", "q_conv1d", "k_conv1d", "b_proj")
def delta_net(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """Two states per head, one of them without decay: a, b, c: [batch, tokens, heads, 2]."""
    hidden, mask, seq_idx = _inputs(inputs, "DeltaNet")
    kind = mixer.qk_activation
    act = {"silu": F.silu, "relu": torch.relu, "elu": lambda x: F.elu(x) + 1, "identity": _identity}[kind]
    q, k = (_short(mixer, x, hidden, seq_idx, F.silu if kind == "silu" else _identity) for x in "qk")
    q, k = (_heads(x if kind == "silu" else act(x), mixer.head_k_dim) for x in (q, k))
    if mixer.qk_norm == "sum":
        q, k = (F.normalize(x, p=1, dim=-1, eps=1e-6) for x in (q, k))
    else:
        q, k = unit(q), unit(k)
    beta = project(mixer.b_proj, hidden).sigmoid() if mixer.use_beta else torch.ones_like(q[..., 0])
    beta = beta * (2 if mixer.allow_neg_eigval else 1)
    space = two_states(q / mixer.head_k_dim**0.5, k, torch.ones_like(beta), beta, as_mask(mask))
    return [StateSpace(space.a.clamp(-_LIMIT, _LIMIT), space.c, space.b, space.mask)]


@fla_probe("kda.KimiDeltaAttention", "q_proj", "k_proj", "q_conv1d", "k_conv1d", "f_proj", "b_proj", "A_log", "dt_bias")
def kimi_delta(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """head_k_dim states per head, diagonal plus rank one: a, b, c: [batch, tokens, heads, head_k_dim]."""
    hidden, mask, seq_idx = _inputs(inputs, "Kimi delta attention")
    shared = mixer.num_v_heads // mixer.num_heads
    q, k = (unit(_heads(_short(mixer, x, hidden, seq_idx, F.silu), mixer.head_k_dim, shared)) for x in "qk")
    gate = _heads(at_least_float32(mixer.f_proj(hidden)) + at_least_float32(mixer.dt_bias), mixer.head_k_dim)
    rate = at_least_float32(mixer.A_log).exp().unsqueeze(-1)
    log_alpha = -rate * F.softplus(gate) if mixer.lower_bound is None else mixer.lower_bound * (rate * gate).sigmoid()
    beta = project(mixer.b_proj, hidden).sigmoid() * (2 if mixer.allow_neg_eigval else 1)
    strength = beta.unsqueeze(-1) * k
    return [delta_rule(q / mixer.head_k_dim**0.5, k, log_alpha.exp(), strength, strength, as_mask(mask))]


@fla_probe("gdn2.GatedDeltaNet2", "q_proj", "k_proj", "q_conv1d", "k_conv1d", "f_proj", "b_proj", "A_log", "dt_bias")
def gated_delta_net2(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """head_k_dim states per head, diagonal plus rank one; the input is the value times its write gate."""
    hidden, mask, seq_idx = _inputs(inputs, "GatedDeltaNet2")
    shared, d = mixer.num_v_heads // mixer.num_heads, mixer.head_k_dim
    q, k = (unit(_heads(_short(mixer, x, hidden, seq_idx, F.silu), d, shared)) for x in "qk")
    rate = _heads(F.softplus(at_least_float32(mixer.f_proj(hidden)) + at_least_float32(mixer.dt_bias)), d)
    log_alpha = (-at_least_float32(mixer.A_log).exp().unsqueeze(-1) * rate).repeat_interleave(shared, dim=2)
    erase = _heads(project(mixer.b_proj, hidden).sigmoid(), d, shared) * (2 if mixer.allow_neg_eigval else 1)
    return [delta_rule(q / d**0.5, k, log_alpha.exp(), erase * k, k, as_mask(mask))]


@fla_probe("gla.GatedLinearAttention", "q_proj", "k_proj", "q_conv1d", "k_conv1d", "gk_proj")
def gated_linear_attention(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """head_k_dim poles per head: a, b, c: [batch, tokens, heads, head_k_dim]."""
    hidden, mask, seq_idx = _inputs(inputs, "GLA")
    d, groups = mixer.head_k_dim, mixer.num_kv_groups
    q = _heads(_short(mixer, "q", hidden, seq_idx, _identity), d)
    k = _heads(_short(mixer, "k", hidden, seq_idx, _identity), d, groups)
    if mixer.feature_map_fn is not None:
        q, k = mixer.feature_map_fn(q), mixer.feature_map_fn(k)
    log_alpha = F.logsigmoid(at_least_float32(mixer.gk_proj(hidden))) / mixer.gate_logit_normalizer
    if mixer.clamp_min is not None:
        log_alpha = log_alpha.clamp_min(mixer.clamp_min)
    return [StateSpace(_heads(log_alpha.exp(), d, groups), q / d**0.5, k, as_mask(mask))]


@fla_probe("hgrn2.HGRN2Attention", "q_proj", "f_proj", "q_conv1d", "f_conv1d")
def hgrn2(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """head_f_dim poles per head: a, b, c: [batch, tokens, heads, head_f_dim]."""
    hidden, mask, seq_idx = _inputs(inputs, "HGRN2")
    q, f = (_short(mixer, x, hidden, seq_idx, _identity) for x in "qf")
    alpha = f.sigmoid()
    bound = inputs.kwargs.get("lower_bound")
    if bound is not None and mixer.layer_idx > 0:
        alpha = bound + (1 - bound) * alpha
    q, a, k = (_heads(x, mixer.head_f_dim) for x in (F.silu(q), alpha, 1 - alpha))
    return [StateSpace(a, q / mixer.head_f_dim**0.5, k, as_mask(mask))]


@fla_probe("multiscale_retention.MultiScaleRetention", "q_proj", "k_proj", "q_conv1d", "k_conv1d")
def retention(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """head_k_dim fixed complex poles per head, decay times rotation: [batch, tokens, heads, head_k_dim]."""
    hidden, mask, seq_idx = _inputs(inputs, "RetNet")
    d = mixer.head_k_dim
    q = _heads(_short(mixer, "q", hidden, seq_idx, _identity), d)
    k = _heads(_short(mixer, "k", hidden, seq_idx, _identity), d, mixer.num_kv_groups)
    if mixer.feature_map_fn is not None:
        q, k = mixer.feature_map_fn(q), mixer.feature_map_fn(k)
    heads = torch.arange(mixer.num_heads, dtype=q.dtype, device=q.device)
    decay = (1 - torch.exp2(-5 - heads)).unsqueeze(-1)
    base = torch.arange(0, d, 2, dtype=q.dtype, device=q.device) / d
    angles = torch.as_tensor(mixer.rotary.base, dtype=q.dtype, device=q.device) ** -base
    (q0, q1), (k0, k1) = (q / d**0.5).chunk(2, -1), k.chunk(2, -1)  # pairs are halves of a head
    return [rotated(decay, angles, (q0, q1), (k0, k1), as_mask(mask))]


@fla_probe("rwkv6.RWKV6Attention", "x_proj", "x_bias", "r_proj", "w_proj", "k_proj", "bonus")
def rwkv6(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """head_k_dim + 1 states per head, diagonal plus rank one; the last is what is read (see RWKV-4)."""
    hidden, mask, seq_idx = _inputs(inputs, "RWKV-6")
    delta = _shift(hidden, seq_idx) - hidden
    low = mixer.x_proj[0](hidden, delta)
    low = mixer.x_proj[1](torch.unflatten(low, -1, (-1, mixer.proj_low_rank_dim)))
    mixes = torch.einsum("btnr,hnr->btnh", low, mixer.x_proj[2].weight.view(hidden.shape[-1], 5, -1)) + mixer.x_bias
    r, w, k = (
        _heads(at_least_float32(getattr(mixer, f"{name}_proj")(hidden, mix, delta)), mixer.head_k_dim)
        for name, mix in zip("rwk", mixes.unbind(-2), strict=False)
    )
    alpha, bonus = torch.exp(-torch.exp(w)), (r * at_least_float32(mixer.bonus) * k).sum(-1, keepdim=True)
    zero, last = torch.zeros_like(k), torch.ones_like(bonus)
    a, c, b, u, v = (
        torch.cat(parts, dim=-1) for parts in ((alpha, 0 * last), (zero, last), (k, bonus), (zero, last), (r, 0 * last))
    )
    return [StateSpace(a, c, b, as_mask(mask), u=u.unsqueeze(-2), v=v.unsqueeze(-2))]


@fla_probe(
    *("rwkv7.RWKV7Attention", "x_r", "x_w", "x_k", "x_a", "k_k", "k_a", "r_proj", "k_proj", "w_lora", "a_lora"),
)
def rwkv7(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:
    """head_dim states per head, diagonal plus rank one: a, b, c: [batch, tokens, heads, head_dim]."""
    hidden, mask, seq_idx = _inputs(inputs, "RWKV-7")
    delta = _shift(hidden, seq_idx) - hidden
    xr, xw, xk, xa = (hidden + delta * getattr(mixer, f"x_{name}") for name in "rwka")
    r, k = project(mixer.r_proj, xr), project(mixer.k_proj, xk)
    # e^(-1/2): the decay of RWKV-7 is at least exp(-0.6065).
    alpha = torch.exp(-0.6065306597126334 * at_least_float32(mixer.w_lora(xw)).sigmoid())
    rate = at_least_float32(mixer.a_lora(xa)).sigmoid()
    key = _heads(k * at_least_float32(mixer.k_k), mixer.head_dim)
    key = unit(key) if mixer.fuse_norm else F.normalize(key, dim=-1)
    k = k + k * (rate - 1) * at_least_float32(mixer.k_a)
    r, k, alpha, rate = (_heads(x, mixer.head_dim) for x in (r, k, alpha, rate))
    return [StateSpace(alpha, r, k, as_mask(mask), u=(key * rate).unsqueeze(-2), v=-key.unsqueeze(-2))]


def _shift(x: Tensor, seq_idx: Tensor | None) -> Tensor:
    """The token before, 0 before the first of a sequence: [batch, tokens, width]."""
    before = F.pad(x, (0, 0, 1, -1))
    return before if seq_idx is None else masked(before, F.pad(seq_idx[:, 1:] == seq_idx[:, :-1], (1, 0)))
