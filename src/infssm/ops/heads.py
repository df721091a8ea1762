"""The scan of Mamba-2, whose heads have one transition each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops import registered as _ops
from infssm.ops.backend import choose, maybe_single
from infssm.ops.checks import compute_dtype, expect_floats, expect_rank, expect_shape, split_groups
from infssm.ops.chunked import chunked_scan
from infssm.ops.records import ScanInputs, ScanOutput, runs
from infssm.ops.scan import scan

LEAST_STATES = {"cpu": 8, "reference": 96, "triton": 1}
"""From this many states on the chunked form serves: where it is the faster one on CPUs, compiled and by PyTorch's
matrix products; on GPUs always, because tokens one after the other leave most of a GPU idle."""


def _per_channel(x: ScanInputs, per_head: Tensor) -> Tensor:
    """[..., heads] -> [..., channels]."""
    return per_head.unsqueeze(-1).expand(*per_head.shape, x.u.shape[-1] // x.A.shape[0]).flatten(-2)


def _steps(x: ScanInputs, delta: Tensor) -> Tensor:
    """The step sizes the scan uses: [batch, tokens, heads]."""
    delta = delta if x.delta_bias is None else delta + x.delta_bias
    return F.softplus(delta) if x.delta_softplus else delta


def scan_heads(x: ScanInputs, *, last_state: bool = False, chunked: bool | None = None) -> ScanOutput:
    """`selective_scan` with one transition per head: y: [batch, tokens, channels] and, if asked for, the last state.

    x: as of the scan, the channels of the heads one after the other, but delta: [batch, tokens, heads] and A, D,
    delta_bias: [heads], A negative.

    chunked: whether to compute in chunks by matrix products, which holds fewer states and is several times faster on
    CPUs where n is not small; None decides by that, and for chunks on GPUs. A last or initial state and `reverse` are
    of the scan alone.
    """
    _check(x)
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
    return _by_products(x) if chosen == "reference" else _by_kernel(x, tensors, chosen == "triton")


def _by_kernel(x: ScanInputs, tensors: list[Tensor], triton: bool) -> ScanOutput:
    """Chunks in the compiled kernel, which reads float32, or in Triton's, which reads narrower floats as they are."""
    B, C = (rows if rows.dim() == 4 else rows.unsqueeze(2) for rows in (x.B, x.C))
    given: list[Tensor | None] = [x.u, x.delta, x.A, B, C, x.D, x.z, x.delta_bias]
    given = given if triton else [maybe_single(tensor) for tensor in given]
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    y, *_ = _ops.heads(*given, x.delta_softplus, runs(x.seq_idx), save, triton)
    return ScanOutput(y.to(x.u.dtype))


def _by_products(x: ScanInputs) -> ScanOutput:
    """Chunks in PyTorch's matrix products."""
    dtype = compute_dtype(x.u, x.delta, x.A, x.B, x.C)
    B, C = ((rows if rows.dim() == 4 else rows.unsqueeze(2)).to(dtype) for rows in (x.B, x.C))
    with torch.autocast(x.u.device.type, enabled=False):
        u, delta = x.u.to(dtype), _steps(x, x.delta.to(dtype))
        y = chunked_scan(u, delta, x.A.to(dtype), B, C, runs(x.seq_idx))
        if x.D is not None:
            y = torch.addcmul(y, u, _per_channel(x, x.D.to(dtype)))
        if x.z is not None:
            y = y * F.silu(x.z.to(dtype))
    return ScanOutput(y.to(x.u.dtype))


def _by_scan(x: ScanInputs, last_state: bool) -> ScanOutput:
    inputs = x._replace(
        delta=_per_channel(x, x.delta),
        A=_per_channel(x, x.A)[:, None].expand(-1, x.B.shape[-1]),
        D=None if x.D is None else _per_channel(x, x.D),
        delta_bias=None if x.delta_bias is None else _per_channel(x, x.delta_bias),
    )
    return scan(inputs, last_state=last_state)


def _check(x: ScanInputs) -> None:
    expect_rank("u", x.u, "batch, tokens, channels")
    expect_rank("A", x.A, "heads")
    expect_floats(x._fields[:-1], x[:-1])
    batch, tokens, channels = x.u.shape
    heads = x.A.shape[0]
    split_groups(channels, heads)
    expect_shape("delta", x.delta, (batch, tokens, heads))
    expect_shape("z", x.z, x.u.shape)
    for name, tensor in (("D", x.D), ("delta_bias", x.delta_bias)):
        expect_shape(name, tensor, (heads,))
    expect_shape("seq_idx", x.seq_idx, (batch, tokens))
    if x.B.dim() == 4:
        split_groups(heads, x.B.shape[2])
    expect_shape("B", x.B, (batch, tokens, *x.B.shape[2:]))
    expect_shape("C", x.C, x.B.shape)
