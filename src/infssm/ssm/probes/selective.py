"""Shared by all probes of selective layers: projections in float32, and states from the inputs of the scan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models import RawStates, StateRows
from infssm.models.mixer import at_least_float32
from infssm.ops import ScanInputs, causal_conv1d, mean_states, seq_idx_from_cu_seqlens, seq_idx_from_position_ids
from infssm.ssm.probe import StateOptions, as_mask
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
    """The activation after a transformers mixer's convolution: a name that `convolve` fuses, or a function."""
    return mixer.activation if mixer.activation in ("silu", "swish") else mixer.act


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the padding tokens. x: [batch, tokens, channels]; mask: [batch, tokens] or None."""
    return x if mask is None else x * mask.unsqueeze(-1).to(x.dtype)


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


Norm = Callable[[Tensor], Tensor]


def selective_inputs(
    u: Tensor,
    x_proj: nn.Module,
    dt_proj: Any,
    A_log: Tensor,
    *,
    norms: tuple[Norm | None, Norm | None, Norm | None] = (None, None, None),
) -> ScanInputs:
    """Mamba's projections of the convolved input u: [batch, tokens, channels]; norms act on dt, B and C."""
    n = A_log.shape[-1]
    projected = project(x_proj, u)
    parts = torch.split(projected, [projected.shape[-1] - 2 * n, n, n], dim=-1)
    dt, B, C = (part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True))
    delta = F.linear(at_least_float32(dt), at_least_float32(dt_proj.weight))
    bias = None if dt_proj.bias is None else at_least_float32(dt_proj.bias)
    return ScanInputs(u, delta, -torch.exp(at_least_float32(A_log)), B, C, delta_bias=bias, delta_softplus=True)


def ssd_inputs(bc: Tensor, dt: Tensor, A_log: Tensor, dt_bias: Tensor, groups: int) -> ScanInputs:
    """Inputs of Mamba-2's scan, without u: bc: [batch, tokens, 2 groups n]; dt: [batch, tokens, heads]."""
    B, C = (torch.unflatten(part, -1, (groups, -1)) if groups > 1 else part for part in bc.chunk(2, dim=-1))
    A = -torch.exp(at_least_float32(A_log)).unsqueeze(-1)
    return ScanInputs(dt, dt, A, B, C, delta_bias=at_least_float32(dt_bias), delta_softplus=True)


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


def selective_parameters(
    which: str,
    *,
    in_proj: Any,
    directions: list[tuple[Any, Any, Any, nn.Parameter]],
    norms: tuple[Any, Any, Any] = (None, None, None),
) -> list[StateRows]:
    """Parameters that form Mamba's states; a direction is (conv1d, x_proj, dt_proj, A_log); norms of dt, B and C."""
    rows: list[StateRows] = []
    for conv, x_proj, dt_proj, A_log in directions:
        n, weight = A_log.shape[-1], x_proj.weight
        rank = len(weight) - 2 * n
        rows += [(A_log, None), *_rows(dt_proj)]
        rows += (
            [(weight, slice(0, rank)), (weight, slice(rank + n, None))] if which == "AC-direct" else [(weight, None)]
        )
        if which == "ABC-full":
            rows += _rows(conv)
    rows += [row for norm in (norms[::2] if which == "AC-direct" else norms) if norm is not None for row in _rows(norm)]
    if which == "ABC-full":
        rows += _rows(in_proj, slice(0, len(in_proj.weight) // 2))
    return rows


def ssd_rows(in_proj: Any, groups: int, n: int, heads: int) -> tuple[slice, slice]:
    """Mamba-2's rows of in_proj for (B, C, dt), and of the convolution for (B, C): the last of each."""
    return slice(len(in_proj.weight) - 2 * groups * n - heads, None), slice(-2 * groups * n, None)


def ssd_parameters(which: str, mixer: Any, groups: int, n: int) -> list[StateRows]:
    """Parameters that form Mamba-2's states: rows of in_proj and of the convolution.

    B and C do not pass through x, so "ABC-full" has no more members than "ABC-direct".
    """
    heads, total, channels = len(mixer.A_log), len(mixer.in_proj.weight), len(mixer.conv1d.weight)
    width = groups * n * (1 if which == "AC-direct" else 2)
    rows: list[StateRows] = [(mixer.A_log, None), (mixer.dt_bias, None)]
    rows += _rows(mixer.in_proj, slice(total - heads - width, total))
    return rows + _rows(mixer.conv1d, slice(channels - width, channels))


def _rows(module: Any, rows: slice | None = None) -> list[StateRows]:
    """Those rows of a layer's weight and bias, as far as it has them."""
    return [(p, rows) for p in (module.weight, getattr(module, "bias", None)) if isinstance(p, nn.Parameter)]
