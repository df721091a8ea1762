"""Shared by all probes of selective layers: projections in float32, and states from the inputs of the scan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models import RawStates, StateRows
from infssm.models.mixer import at_least_float32
from infssm.ops import ScanInputs, causal_conv1d, mean_states, seq_idx_from_cu_seqlens, seq_idx_from_position_ids
from infssm.ssm.probe import MixerInputs, StateOptions, as_mask, refuse_generation
from infssm.ssm.space import StateSpace


def project(linear: nn.Module, x: Tensor, rows: slice = slice(None)) -> Tensor:
    """Some output features of a linear layer, in float32. Layers with adapters and quantised ones are called whole."""
    if type(linear) is not nn.Linear:
        # In a layer with an adapter the base weight may be bfloat16 where x, computed by us, is float32.
        weight = getattr(linear, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            x = x.to(weight.dtype)
        return at_least_float32(linear(x)[..., rows])
    bias = None if linear.bias is None else at_least_float32(linear.bias[rows])
    return F.linear(at_least_float32(x), at_least_float32(linear.weight[rows]), bias)


def convolve(
    conv: nn.Conv1d,
    x: Tensor,
    *,
    rows: slice = slice(None),
    act: Any = "silu",
    reverse: bool = False,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Some channels of a causal depthwise convolution, then the activation (a name or a callable)."""
    weight, bias = at_least_float32(conv.weight[rows, 0]), conv.bias
    bias = None if bias is None else at_least_float32(bias[rows])
    fused = act in ("silu", "swish")
    y = causal_conv1d(at_least_float32(x), weight, bias, silu=fused, reverse=reverse, seq_idx=seq_idx)
    return y if fused else act(y)


def activation(mixer: Any) -> Any:
    """The activation after a mixer's convolution: a name that `convolve` fuses, or a function."""
    name = getattr(mixer, "activation", "silu")
    return name if name in ("silu", "swish") else mixer.act


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the padding tokens. x: [batch, tokens, channels]; mask: [batch, tokens] or None."""
    return x if mask is None else x * mask.unsqueeze(-1).to(x.dtype)


def mamba_ssm_input(inputs: MixerInputs, name: str) -> Tensor:
    """The hidden states that a mamba_ssm mixer was called with; refused while generating."""
    cache = inputs.kwargs.get("inference_params")
    refuse_generation(cache is not None and cache.seqlen_offset > 0)
    hidden: Tensor = inputs.get(0, name)
    return hidden


def transformers_input(mixer: Any, inputs: MixerInputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The hidden states [batch, tokens, width], padding mask and packing a transformers mixer was called with."""
    cache = inputs.get(1, "cache_params")
    refuse_generation(cache is not None and cache.has_previous_state(mixer.layer_idx))
    hidden, mask = inputs.get(0, "hidden_states"), inputs.get(2, "attention_mask")
    return masked(hidden, mask), mask, packing(hidden, inputs.kwargs)


def packing(hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor | None:
    """The number of each token's sequence [batch, tokens], where a layer is called with packed sequences.

    They are given as ``seq_idx`` [batch, tokens], as ``cu_seqlens`` or ``cu_seq_lens_q`` of one row, or as
    ``position_ids`` [batch, tokens] that restart.
    """
    batch, tokens = hidden.shape[:2]
    if (seq_idx := arguments.get("seq_idx")) is not None:
        if seq_idx.shape != (batch, tokens):
            raise ConfigError(f"seq_idx has shape {list(seq_idx.shape)}, expected {[batch, tokens]}")
        return seq_idx if bool((seq_idx != seq_idx[:, :1]).any()) else None
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if (lengths := arguments.get(name)) is not None:
            if batch != 1:
                raise ConfigError(f"{name} packs one row, but the batch has {batch}; give seq_idx instead")
            return seq_idx_from_cu_seqlens(lengths, tokens)
    positions = arguments.get("position_ids")
    if torch.compiler.is_exporting() or not isinstance(positions, Tensor) or positions.shape != (batch, tokens):
        return None  # an exported model takes no position_ids, so its own are those of one sequence per row
    restarts = seq_idx_from_position_ids(positions)
    return restarts if bool(restarts[:, -1].any()) else None


def state_space(
    inputs: ScanInputs,
    options: StateOptions,
    *,
    mask: Tensor | None = None,
    limit: tuple[float, float] = (0.0, math.inf),
) -> StateSpace:
    """States of a selective layer: a, b, c: [batch, tokens, n] ([batch, tokens, groups, n] with groups)."""
    zoh = options.b_mode == "zoh"
    raw = raw_states(inputs, include_dt_bias=options.include_dt_bias, zoh=zoh, limit=limit)
    return StateSpace(raw.a, raw.c, options.b(raw.b, raw.delta, raw.zoh), as_mask(mask))


def raw_states(
    inputs: ScanInputs, *, include_dt_bias: bool, zoh: bool, limit: tuple[float, float] = (0.0, math.inf)
) -> RawStates:
    """States of a selective layer whose step size is clamped to ``limit``."""
    delta, bias, softplus = inputs.delta, inputs.delta_bias if include_dt_bias else None, inputs.delta_softplus
    if limit[0] > 0.0 or limit[1] < math.inf:
        delta = F.softplus(delta if bias is None else delta + bias).clamp(*limit)
        bias, softplus = None, False
    groups = inputs.B.shape[2] if inputs.B.ndim == 4 else None
    means = mean_states(delta, inputs.A, delta_bias=bias, delta_softplus=softplus, groups=groups, zoh=zoh)
    return RawStates(a=means.a, c=inputs.C, b=inputs.B, delta=means.delta, zoh=means.zoh)


def every_row(mixer: Any, *names: str) -> list[StateRows]:
    """All rows of the parameters and layers of these names; those a mixer lacks are left out.

    Of a layer weight and bias are taken, so that the adapters that LoRA adds to it are not; of several layers in
    sequence all parameters.
    """
    rows: list[StateRows] = []
    for part in (getattr(mixer, name, None) for name in names):
        if isinstance(part, Tensor):
            rows.append((part, None))
        elif part is not None:
            rows += rows_of(part) if hasattr(part, "weight") else [(parameter, None) for parameter in part.parameters()]
    return rows


def rows_of(layer: Any, rows: slice | None = None) -> list[StateRows]:
    """Those rows of a layer's weight and bias, as far as it has them."""
    return [(p, rows) for p in (layer.weight, getattr(layer, "bias", None)) if isinstance(p, nn.Parameter)]
