"""Mamba-2's scan (state space duality): heads with one transition each, in chunks of tokens.

Within a chunk, with s the running sum of delta A, `y_i = sum_{j <= i} exp(s_i - s_j) (C_i . B_j) delta_j u_j`, so
nearly all work is in matrix products; between chunks one state [head size, n] is carried, which is all that the
backward keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.backend import choose, in_float32
from infssm.ops.checks import compute_dtype, expect_rank
from infssm.ops.library import define, flat, given, keep, native, new, rows
from infssm.ops.scan import (
    ARGUMENTS,
    GRADIENTS,
    ScanInputs,
    ScanOutput,
    by_input,
    check_shapes,
    differentiate,
    input_grads,
    readable,
    recomputed,
    scan,
    split_arguments,
    step_size,
    with_groups,
)
from infssm.ops.triton import ssd as _triton

LEAST_STATES = {"cpu": 8, "reference": 96, "triton": 1}
"""From this many states on the chunked form serves: where it is the faster one on CPUs, compiled and by PyTorch's
matrix products; on GPUs always, because tokens one after the other leave most of a GPU idle."""


def scan_ssd(x: ScanInputs, *, last_state: bool = False, chunked: bool | None = None) -> ScanOutput:
    """`selective_scan` with one transition per head: y: [batch, tokens, channels] and, if asked for, the last state.

    x: as of the scan, the channels of the heads one after the other, but delta: [batch, tokens, heads] and A, D,
    delta_bias: [heads], A negative.

    chunked: whether to compute in chunks by matrix products, which holds fewer states and is several times faster on
    CPUs where n is not small; None decides by that, and for chunks on GPUs. A last or initial state and `reverse` are
    of the scan alone.
    """
    check_shapes(x, per_head=True)
    whole = last_state or x.reverse or x.initial_state is not None
    tensors = [value for value in x[:-1] if isinstance(value, Tensor)]
    chosen = choose(None, *tensors)
    if chunked is None:
        # An exported program runs the scan as one loop node for any number of tokens; chunks would be unrolled.
        served = (x.u.is_cpu or chosen == "triton") and not torch.compiler.is_exporting()
        chunked = not whole and served and x.B.shape[-1] >= LEAST_STATES[chosen]
    if not chunked or x.u.numel() == 0:
        return _by_scan(x, last_state)
    if whole:
        raise ConfigError("the chunked form has no last state, initial state or reverse; leave chunked to None")
    x = with_groups(x)
    if chosen == "reference":
        return ScanOutput(_reference(x))
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # Triton's kernels read narrower floats as they are.
    floats = in_float32(x[:8]) if chosen == "cpu" else x[:8]
    y, *_ = _ssd(*floats, *x[8:], save, chosen == "triton")
    return ScanOutput(y.to(x.u.dtype))


def _by_scan(x: ScanInputs, last_state: bool) -> ScanOutput:
    """Token by token, the heads' values repeated for each of their channels."""
    channels = x.u.shape[-1]
    inputs = x._replace(
        delta=_per_channel(x.delta, channels),
        A=_per_channel(x.A, channels)[:, None].expand(-1, x.B.shape[-1]),
        D=None if x.D is None else _per_channel(x.D, channels),
        delta_bias=None if x.delta_bias is None else _per_channel(x.delta_bias, channels),
    )
    return scan(inputs, last_state=last_state)


def _per_channel(per_head: Tensor, channels: int) -> Tensor:
    """[..., heads] -> [..., channels]."""
    return per_head.unsqueeze(-1).expand(*per_head.shape, channels // per_head.shape[-1]).flatten(-2)


# The reference: chunks in PyTorch's matrix products. Exponents `s_i - s_j` are sums of the steps between j and i, not
# differences of running sums, whose rounding would be that of the whole chunk. Shapes below: b batch, c chunks,
# L tokens of a chunk, g groups, k heads of a group, p head size, n states.


def _reference(x: ScanInputs) -> Tensor:
    dtype = compute_dtype(x.u, x.delta, x.A, x.B, x.C)
    with torch.autocast(x.u.device.type, enabled=False):
        u, delta = x.u.to(dtype), step_size(x.delta.to(dtype), x.delta_bias, x.delta_softplus)
        (y,) = recomputed(_chunked, u, delta, x.A.to(dtype), x.B.to(dtype), x.C.to(dtype), x.seq_idx)
        if x.D is not None:
            y = torch.addcmul(y, u, _per_channel(x.D.to(dtype), u.shape[-1]))
        if x.z is not None:
            y = y * F.silu(x.z.to(dtype))
    return y.to(x.u.dtype)


CHUNK = 64


def _chunked(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, segments: Tensor | None) -> tuple[Tensor]:
    """y without skip and gate."""
    tokens, groups = u.shape[1], B.shape[2]
    dt = _cut(delta, groups)  # [b, c, g, L, k]
    x = _scaled(_cut(u, groups), dt)  # [b, c, g, L, k p]
    B, C = (_cut(tensor.flatten(2), groups) for tensor in (B, C))  # [b, c, g, L, n]
    inside, entering, leaving, through = _decays(dt * A.view(groups, 1, -1), segments)
    added = (B.mT @ _scaled(x, leaving)).unbind(1)  # to the state after each chunk, [b, g, n, k p]
    state, before = torch.zeros_like(added[0]), []
    for one, factor in zip(added, through.unbind(1), strict=True):
        before.append(state)
        state = _scaled(state, factor.unsqueeze(-2)) + one
    by_head = torch.unflatten(x, -1, (through.shape[-1], -1)).transpose(-2, -3)  # [b, c, g, k, L, p]
    within = (inside * (C @ B.mT).unsqueeze(3)) @ by_head
    y = _scaled(C @ torch.stack(before, dim=1), entering) + within.transpose(-2, -3).flatten(-2)
    return (y.transpose(2, 3).flatten(3).flatten(1, 2)[:, :tokens],)


def _decays(steps: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The decay of inputs and states, from delta A [b, c, g, L, k] and the packed sequences [b, tokens] or None.

    inside: [b, c, g, k, L, L], exp(s_i - s_j) where token j reaches token i, else 0; entering: [b, c, g, L, k], by
    which the state before the chunk reaches a token; leaving: by which a token reaches the state after it; through:
    [b, c, g, k], by which the one state reaches the other.
    """
    between = steps.mT.unsqueeze(-1).expand(*steps.mT.shape, steps.shape[-2]).tril(-1).cumsum(-2)
    inside, entering = between.exp().tril(), steps.cumsum(3).exp()
    leaving, through = inside[..., -1, :].mT, entering[..., -1, :]
    if segments is None:
        return inside, entering, leaving, through
    missing = -segments.shape[1] % CHUNK
    segments = torch.cat([segments, segments[:, -1:].expand(-1, missing)], dim=1)
    segments = torch.unflatten(segments, 1, (-1, CHUNK))
    before = F.pad(segments[:, :-1, -1], (1, 0))  # the sequence that the state before a chunk belongs to
    same = segments.unsqueeze(-1) == segments.unsqueeze(-2)
    enters, leaves = segments == before.unsqueeze(-1), segments == segments[..., -1:]
    return (
        inside * same[:, :, None, None],
        entering * enters[:, :, None, :, None],
        leaving * leaves[:, :, None, :, None],
        through * (segments[..., -1] == before)[:, :, None, None],
    )


def _cut(tensor: Tensor, groups: int) -> Tensor:
    """[b, tokens, g m] -> [b, c, g, L, m], the last chunk filled with 0."""
    missing = -tensor.shape[1] % CHUNK
    tensor = F.pad(tensor, (0, 0, 0, missing)) if missing else tensor
    return torch.unflatten(torch.unflatten(tensor, 1, (-1, CHUNK)), -1, (groups, -1)).transpose(2, 3)


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    """[..., k p] times [..., k]."""
    return (torch.unflatten(x, -1, (by.shape[-1], -1)) * by.unsqueeze(-1)).flatten(-2)


# The operator.


def _up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


def saved_shape(x: ScanInputs) -> tuple[int, ...]:
    """The state before each chunk but the first, in the order in which the kernel holds it."""
    (batch, tokens, channels), heads, n = x.u.shape, x.A.shape[0], x.B.shape[3]
    state = _up(channels // heads, native.lanes()) * _up(n, native.ssd_rows())
    return batch, (tokens - 1) // native.ssd_span(), heads * state


def _outputs(*args: Any) -> tuple[Tensor, ...]:
    x, (save, triton) = split_arguments(args)
    expect_rank("u", x.u, "batch, tokens, channels")
    expect_rank("A", x.A, "heads")
    expect_rank("B", x.B, "batch, tokens, groups, n")
    # The backward needs y only for the gradient of the gate.
    plain = x.u.shape if save and x.z is not None else (0,)
    saved = (_triton.saved_shape(x) if triton else saved_shape(x)) if save else (0,)
    return new(x.u, *x.u.shape), new(x.u, *plain), new(x.u, *saved)


def _kernel(*args: Any) -> tuple[Tensor, ...]:
    y, plain, saved = outputs = _outputs(*args)
    x, (_, triton) = split_arguments(args)
    x = readable(x)._replace(A=flat(x.A))
    if triton:
        check_shapes(x, per_head=True)  # the compiled module checks shapes itself
        _triton.forward(x, y, given(plain), given(saved))
    else:
        native.ssd_forward(x, y, plain, saved, torch.get_num_threads(), None, None)
    return outputs


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    return differentiate(ctx, _ssd_backward, [grad])


def _backward_kernel(*args: Any) -> tuple[Tensor, ...]:
    x, (plain, saved, grad, triton) = split_arguments(args)
    found = input_grads(*args)
    call = readable(x)._replace(A=flat(x.A)), given(flat(plain)), given(flat(saved)), rows(grad), by_input(found)
    if triton:
        _triton.backward(*call)
    else:
        native.ssd_backward(*call, torch.get_num_threads(), *(None,) * 4)
    return found


_ssd_backward = define(
    f"ssd_backward({ARGUMENTS}, Tensor plain, Tensor saved, Tensor grad, bool triton) -> {GRADIENTS}",
    _backward_kernel,
    input_grads,
)
_ssd = define(
    f"ssd({ARGUMENTS}, bool save, bool triton) -> (Tensor y, Tensor plain, Tensor saved)",
    _kernel,
    _outputs,
    setup=lambda ctx, inputs, output: keep(ctx, inputs, output[1:]),
    backward=_backward,
)
