"""The selective scan; on request also the channel means of the discretised parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infssm.errors import ConfigError
from infssm.ops.backend import choose, in_float32
from infssm.ops.checks import compute_dtype, expect_channels, expect_floats, expect_rank, expect_shape, split_groups
from infssm.ops.library import arguments, define, flat, given, keep, kept, native, new, rows
from infssm.ops.packing import segment_ids
from infssm.ops.triton import scan as _triton


class ScanInputs(NamedTuple):
    """The tensors and flags of `selective_scan`, which describes them, in the order of the operator and its kernels."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    delta_bias: Tensor | None = None
    delta_softplus: bool = False
    reverse: bool = False
    initial_state: Tensor | None = None
    seq_idx: Tensor | None = None


class ScanStates(NamedTuple):
    """Means over the channels (of each group) of exp(ΔA), Δ and the ZOH factor, in token order; not the hidden state.

    a: [batch, tokens, n] mean of exp(delta A); delta: [batch, tokens] mean of delta;
    zoh: [batch, tokens, n] mean of (exp(delta A) - 1) / A, or None. With groups: [batch, tokens, groups, n].
    """

    a: Tensor
    delta: Tensor
    zoh: Tensor | None = None

    def without_groups(self) -> ScanStates:
        """Without the group dimension of size 1."""
        zoh = None if self.zoh is None else self.zoh.squeeze(2)
        return ScanStates(self.a.squeeze(2), self.delta.squeeze(2), zoh)


class ScanOutput(NamedTuple):
    """The outputs of a selective scan; None for those not requested.

    y: [batch, tokens, channels]; last_state: [batch, channels, n]; states: see `ScanStates`.
    """

    y: Tensor
    last_state: Tensor | None = None
    states: ScanStates | None = None


States = bool | Literal["zoh"]


@overload
def selective_scan(
    u: Tensor, *more: Any, return_states: Literal[True, "zoh"], return_last_state: Literal[True], **options: Any
) -> tuple[Tensor, Tensor, ScanStates]: ...
@overload
def selective_scan(
    u: Tensor, *more: Any, return_states: Literal[True, "zoh"], **options: Any
) -> tuple[Tensor, ScanStates]: ...
@overload
def selective_scan(
    u: Tensor, *more: Any, return_last_state: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(u: Tensor, *more: Any, **options: Any) -> Tensor: ...
def selective_scan(  # type: ignore[misc] # the overloads say what is returned, and leave the arguments to this one
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    reverse: bool = False,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    return_states: States = False,
    backend: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor | ScanStates, ...]:
    """Run `h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t`, `y_t = (C_t h_t + D u_t) silu(z_t)` over the tokens.

    u, delta, z: [batch, tokens, channels]; A: [channels, n] real; B, C: [batch, tokens, n] or
    [batch, tokens, groups, n]; D, delta_bias: [channels]; initial_state: [batch, channels, n].
    `delta_softplus` applies softplus to `delta + delta_bias`. `reverse` scans from the last token to the first.
    An A expanded from [channels, 1] (a scalar transition) costs one exponential per channel instead of n.
    seq_idx: [batch, tokens], for rows that hold several sequences: the state restarts where the number changes.

    Returns y: [batch, tokens, channels], or the tuple `(y[, last_state][, states])` of the requested outputs;
    last_state: [batch, channels, n]; states: see `ScanStates` (`return_states="zoh"` fills its zoh).
    Every output is differentiable in every input.
    """
    x = ScanInputs(u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse, initial_state, seq_idx)
    output = scan(x, last_state=return_last_state, states=return_states, backend=backend)
    wanted = tuple(part for part in output if part is not None)
    return wanted if len(wanted) > 1 else output.y


def scan(x: ScanInputs, *, last_state: bool = False, states: States = False, backend: str | None = None) -> ScanOutput:
    """`selective_scan` of a record, into a record."""
    check_shapes(x)
    if states not in (False, True, "zoh"):
        raise ConfigError(f"return_states={states!r}, expected False, True or 'zoh'")
    tensors = [value for value in x[:-1] if isinstance(value, Tensor)]  # all but seq_idx
    chosen = choose(backend, *tensors)
    grouped, x = x.B.dim() == 4, with_groups(x)
    if chosen == "reference":
        output = reference(x, last_state, states)
    else:
        save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        wanted = 0 if not states else 2 if states == "zoh" else 1
        floats = in_float32(x[:8])  # u to delta_bias
        inputs = (*floats, x.delta_softplus, x.reverse, *in_float32((x.initial_state, x.seq_idx)))
        y, last, a, delta, zoh, _ = _scan(*inputs, last_state, wanted, save, chosen == "triton")
        means = ScanStates(a, delta, zoh if wanted == 2 else None) if wanted else None
        output = ScanOutput(y, last if last_state else None, means)
    if x.u.dtype != output.y.dtype:
        output = output._replace(y=output.y.to(x.u.dtype))
    if grouped or output.states is None:
        return output
    return output._replace(states=output.states.without_groups())


def with_groups(x: ScanInputs) -> ScanInputs:
    """As references and operators take it: B and C with a dimension of groups, the numbers of sequences in order."""
    B, C = (x.B, x.C) if x.B.dim() == 4 else (x.B.unsqueeze(2), x.C.unsqueeze(2))
    return x._replace(B=B, C=C, seq_idx=None if x.seq_idx is None else segment_ids(x.seq_idx))


def check_shapes(x: ScanInputs, *, per_head: bool = False) -> None:
    """Raise unless shapes and types fit; per_head: as of `scan_ssd`, with one delta, A, D and bias for each head."""
    expect_floats(x._fields[:-1], x[:-1])
    expect_rank("u", x.u, "batch, tokens, channels")
    expect_rank("A", x.A, "heads" if per_head else "channels, n")
    expect_channels("u", x.u)
    batch, tokens, channels = x.u.shape
    width, n = x.A.shape[0] if per_head else channels, x.B.shape[-1] if per_head else x.A.shape[1]
    split_groups(channels, width)
    expect_shape("A", x.A, (width,) if per_head else (width, n))
    expect_shape("delta", x.delta, (batch, tokens, width))
    expect_shape("z", x.z, x.u.shape)
    for name, tensor in (("D", x.D), ("delta_bias", x.delta_bias)):
        expect_shape(name, tensor, (width,))
    expect_shape("initial_state", x.initial_state, (batch, channels, n))
    expect_shape("seq_idx", x.seq_idx, (batch, tokens))
    groups = x.B.shape[2:3] if x.B.dim() == 4 else ()
    for count in groups:
        split_groups(width, count)
    expect_shape("B", x.B, (batch, tokens, *groups, n))
    expect_shape("C", x.C, x.B.shape)


# The reference: plain PyTorch, any float dtype, any device, ordinary autograd.

# Tokens whose [batch, tokens, channels, n] tensors exist at one time; the backward recomputes chunk by chunk.
CHUNK = 16


def reference(x: ScanInputs, last_state: bool, states: bool | str) -> ScanOutput:
    """The scan of a record; B, C: [batch, tokens, groups, n]."""
    dtype = compute_dtype(x.u, x.delta, x.A, x.B, x.C)
    # Exported programs have no autocast to leave, and a program with both autocast and a loop node cannot be saved.
    exporting = torch.compiler.is_exporting()
    with contextlib.nullcontext() if exporting else torch.autocast(x.u.device.type, enabled=False):
        u, dt = x.u.to(dtype), step_size(x.delta.to(dtype), x.delta_bias, x.delta_softplus)
        converted = x._replace(u=u, delta=dt, A=x.A.to(dtype), B=x.B.to(dtype), C=x.C.to(dtype))
        y, end, means = _scan_chunks(converted, states)
        if x.D is not None:
            y = y + x.D * u
        if x.z is not None:
            y = y * F.silu(x.z.to(dtype))
    return ScanOutput(y, end if last_state else None, means)


def split_channels(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """Split the channel dimension `dim` into [groups, channels / groups]."""
    size = tensor.shape[dim] // groups
    return torch.unflatten(tensor, dim, (groups, size))


def recomputed(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """Call `function`, keeping only its inputs for the backward."""
    result: tuple[Tensor, ...] = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def step_size(delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool) -> Tensor:
    """The step size the scan uses: delta plus bias, through softplus if asked."""
    if delta_bias is not None:
        delta = delta + delta_bias
    return F.softplus(delta) if delta_softplus else delta


def _scan_chunks(x: ScanInputs, states: bool | str) -> tuple[Tensor, Tensor, ScanStates | None]:
    """y before skip and gate, the last state and the means; delta is the step size."""
    if torch.compiler.is_exporting() and not states and x.seq_idx is None:
        return _scan_exported(x)
    batch, tokens, channels = x.u.shape
    groups, n = x.B.shape[2:]
    h = x.u.new_zeros(batch, channels, n) if x.initial_state is None else x.initial_state.to(x.u.dtype)
    h, A = split_channels(h, 1, groups), split_channels(x.A, 0, groups)
    u, dt = split_channels(x.u, -1, groups), split_channels(x.delta, -1, groups)
    continues = _continues(x) if x.seq_idx is not None else u.new_ones(1, tokens)
    # Splitting, unlike slicing, puts the gradients of the chunks together once.
    chunks = list(zip(*(torch.split(tensor, CHUNK, dim=1) for tensor in (u, dt, x.B, x.C, continues)), strict=True))
    parts = []
    for chunk in reversed(chunks) if x.reverse else chunks:
        h, *part = recomputed(_scan_chunk, h, A, *chunk, x.reverse, states)
        parts.append(part)
    if x.reverse:
        parts.reverse()
    y = torch.cat([part[0] for part in parts], dim=1).flatten(-2)
    if not states:
        return y, h.flatten(1, 2), None
    a = torch.cat([part[1] for part in parts], dim=1)
    zoh = torch.cat([part[2] for part in parts], dim=1) if states == "zoh" else None
    return y, h.flatten(1, 2), ScanStates(a, dt.mean(-1), zoh)


def _scan_exported(x: ScanInputs) -> tuple[Tensor, Tensor, None]:
    """The scan as one loop node of an exported program (`Scan` in ONNX), for any number of tokens.

    Unrolled, every token would be a dozen nodes: a Vim with 64 tokens and 6 layers took over nine minutes to export.
    """
    from torch._higher_order_ops.scan import scan as loop

    groups = x.B.shape[2]
    h = x.u.new_zeros(x.u.shape[0], *x.A.shape) if x.initial_state is None else x.initial_state.to(x.u.dtype)
    h, A = split_channels(h, 1, groups), split_channels(x.A, 0, groups)
    u, dt = split_channels(x.u, -1, groups), split_channels(x.delta, -1, groups)

    def step(h: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        dt, drive, B, C = token  # [batch, groups, k] and [batch, groups, n]
        h = torch.exp(dt.unsqueeze(-1) * A) * h + drive.unsqueeze(-1) * B.unsqueeze(2)
        return h, (h * C.unsqueeze(2)).sum(-1)

    h, y = loop(step, h, [tensor.transpose(0, 1) for tensor in (dt, dt * u, x.B, x.C)], reverse=x.reverse)
    return y.transpose(0, 1).flatten(-2), h.flatten(1, 2), None


def _continues(x: ScanInputs) -> Tensor:
    """1 where the state continues from the token before in scan order, 0 where a sequence begins: [batch, tokens]."""
    assert x.seq_idx is not None
    changes = (x.seq_idx[:, 1:] != x.seq_idx[:, :-1]).to(x.u.dtype)
    return 1 - F.pad(changes, (0, 1) if x.reverse else (1, 0))


def _scan_chunk(
    h: Tensor,
    A: Tensor,
    u: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    continues: Tensor,
    reverse: bool,
    states: bool | str,
) -> tuple[Tensor, ...]:
    """Last h, y and means of a chunk. h: [batch, groups, k, n]; u, dt: [batch, T, groups, k]; A: [groups, k, n]."""
    factor = continues[..., None, None, None] * torch.exp(dt.unsqueeze(-1) * A)
    abar, drive = factor.unbind(1), ((dt * u).unsqueeze(-1) * B.unsqueeze(3)).unbind(1)
    steps = range(len(abar) - 1, -1, -1) if reverse else range(len(abar))
    history = []
    for t in steps:
        h = abar[t] * h + drive[t]
        history.append(h)
    if reverse:
        history.reverse()
    y = (torch.stack(history, dim=1) * C.unsqueeze(3)).sum(-1) if history else torch.zeros_like(u)
    return (h, y, *(chunk_means(dt, A, states == "zoh") if states else ()))


def chunk_means(dt: Tensor, A: Tensor, zoh: bool) -> tuple[Tensor, ...]:
    """Means over the channels of a group. dt: [batch, tokens, groups, k]; A: [groups, k, n]."""
    exponent = dt.unsqueeze(-1) * A
    a = exponent.exp().mean(-2)
    if not zoh:
        return (a,)
    return a, (dt.unsqueeze(-1) * _exp_slope(exponent)).mean(-2)


def _exp_slope(x: Tensor) -> Tensor:
    """(exp(x) - 1) / x, by its series near 0, so that the derivative keeps its digits there too."""
    near = x.abs() < 0.05
    series = torch.ones_like(x)
    for k in range(9, 1, -1):
        series = 1 + series * x / k
    return torch.where(near, series, x.expm1() / torch.where(near, 1, x))


# The operator.


class KernelOutputs(NamedTuple):
    """y, the last state, the mean states, and what the backward starts its chunks from; or gradients of the first five.

    None if there is none.
    """

    y: Any
    last: Any
    a: Any
    delta: Any
    zoh: Any
    saved: Any = None


_COUNT = len(ScanInputs._fields)
_WITH_GRADIENT = [name for name in ScanInputs._fields if name not in ("delta_softplus", "reverse", "seq_idx")]


def split_arguments(args: tuple[Any, ...]) -> tuple[ScanInputs, tuple[Any, ...]]:
    """The inputs at the head of an operator's arguments, and the others."""
    return ScanInputs(*args[:_COUNT]), args[_COUNT:]


def saved_shape(shape: Sequence[int], groups: int, n: int, triton: bool = False) -> tuple[int, ...]:
    """States before each chunk of u with this shape, in the order in which the kernels hold them."""
    batch, tokens, channels = shape
    if triton:
        return batch, -(-tokens // _triton.CHUNK), n * channels
    lanes = native.lanes()
    padded = groups * -(-channels // groups // lanes) * lanes
    return batch, -(-tokens // native.CHUNK), padded * n


def _outputs(*args: Any) -> KernelOutputs:
    x, (last, states, save, triton) = split_arguments(args)
    expect_rank("u", x.u, "batch, tokens, channels")
    expect_rank("B", x.B, "batch, tokens, groups, n")
    u = x.u
    batch, tokens, channels = u.shape
    groups, n = x.B.shape[2:]
    return KernelOutputs(
        y=new(u, batch, tokens, channels),
        last=new(u, batch, channels, n) if last else new(u, 0),
        a=new(u, batch, tokens, groups, n) if states else new(u, 0),
        delta=new(u, batch, tokens, groups) if states else new(u, 0),
        zoh=new(u, batch, tokens, groups, n) if states == 2 else new(u, 0),
        saved=new(u, *saved_shape(u.shape, groups, n, triton)) if save else new(u, 0),
    )


def readable(x: ScanInputs) -> ScanInputs:
    """As the kernels read them: any strides, but the last dimension contiguous; A as it is."""
    by_token = {name: rows(getattr(x, name)) for name in ("u", "delta", "B", "C", "z")}
    whole = {name: flat(getattr(x, name)) for name in ("D", "delta_bias", "initial_state")}
    return x._replace(**by_token, **whole)


def _kernel(*args: Any) -> KernelOutputs:
    x, (*_, triton) = split_arguments(args)
    outputs = _outputs(*args)
    wanted = KernelOutputs(*map(given, outputs))
    if triton:
        check_shapes(x)  # the compiled module checks shapes itself
        _triton.forward(readable(x), wanted)
    else:
        native.scan_forward(readable(x), wanted, wanted.saved, torch.get_num_threads(), 1.0, False)
    return outputs


def differentiate(ctx: Any, operator: Callable[..., Any], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of a scan, from those of its outputs by the operator of its backward."""
    inputs, outputs = kept(ctx)
    found = operator(*inputs[:_COUNT], *outputs, *grads, inputs[-1])
    found = dict(zip(_WITH_GRADIENT, found, strict=True))
    asked = zip_longest(ScanInputs._fields, ctx.needs_input_grad)
    return tuple(found.get(name) if need else None for name, need in asked)


def input_grads(*args: Any) -> tuple[Tensor, ...]:
    """Memory for the gradients of the inputs; empty for an input that was not given."""
    x, _ = split_arguments(args)
    inputs = (getattr(x, name) for name in _WITH_GRADIENT)
    return tuple(new(x.u, 0) if like is None else new(x.u, *like.shape) for like in inputs)


def by_input(grads: Sequence[Tensor]) -> ScanInputs:
    """What `input_grads` returned as the record that the kernels fill."""
    return ScanInputs(**dict(zip(_WITH_GRADIENT, map(given, grads), strict=True)))


def _backward_kernel(*args: Any) -> tuple[Tensor, ...]:
    x, (saved, grad_y, *of_states, triton) = split_arguments(args)
    last, a, delta, zoh = (flat(given(grad)) for grad in of_states)
    if zoh is not None and a is None:
        a = torch.zeros_like(zoh)
    y = new(x.u, *x.u.shape).zero_() if grad_y is None else rows(grad_y)
    found = input_grads(*args)
    call = readable(x), saved.contiguous(), KernelOutputs(y, last, a, delta, zoh), by_input(found)
    if triton:
        _triton.backward(*call)
    else:
        native.scan_backward(*call, torch.get_num_threads(), 1.0, False)
    return found


ARGUMENTS = arguments(ScanInputs)
GRADIENTS = "(" + ", ".join(["Tensor"] * len(_WITH_GRADIENT)) + ")"
_scan_backward = define(
    f"scan_backward({ARGUMENTS}, Tensor saved, Tensor? grad_y, Tensor? grad_last, Tensor? grad_a, Tensor? grad_delta,"
    f" Tensor? grad_zoh, bool triton) -> {GRADIENTS}",
    _backward_kernel,
    input_grads,
)
_scan = define(
    f"scan({ARGUMENTS}, bool last, int states, bool save, bool triton)"
    " -> (Tensor y, Tensor last, Tensor a, Tensor delta, Tensor zoh, Tensor saved)",
    _kernel,
    _outputs,
    setup=lambda ctx, inputs, output: keep(ctx, inputs, output[-1:]),
    backward=lambda ctx, *grads: differentiate(ctx, _scan_backward, grads[:5]),
)
