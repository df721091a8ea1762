"""The scan of Mamba-2, whose heads have one transition each."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.kernels._checks import compute_dtype, expect_floats, expect_rank, expect_shape, split_groups
from infssm.kernels._chunked import chunked_scan
from infssm.kernels.records import ScanInputs, ScanOutput, runs
from infssm.kernels.scan import scan

LEAST_STATES = 96
"""From this many states on the chunked form is the faster one on CPUs, with AVX-512; with less, from fewer."""


class HeadInputs(NamedTuple):
    """What a scan of heads reads.

    u, z: [batch, tokens, channels], the heads one after the other; delta: [batch, tokens, heads];
    A, D, delta_bias: [heads], A negative; B, C: [batch, tokens, n] or [batch, tokens, groups, n];
    the rest as of `ScanInputs`.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    delta_bias: Tensor | None = None
    delta_softplus: bool = False
    seq_idx: Tensor | None = None

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.u.shape[-1] // self.A.shape[0]

    def per_channel(self, per_head: Tensor) -> Tensor:
        """[..., heads] -> [..., channels]."""
        return per_head.unsqueeze(-1).expand(*per_head.shape, self.head_dim).flatten(-2)

    def steps(self) -> Tensor:
        """The step sizes the scan uses: [batch, tokens, heads]."""
        delta = self.delta if self.delta_bias is None else self.delta + self.delta_bias
        return F.softplus(delta) if self.delta_softplus else delta


def scan_heads(x: HeadInputs, *, last_state: bool = False, chunked: bool | None = None) -> ScanOutput:
    """`selective_scan` of `HeadInputs`: y: [batch, tokens, channels] and, if asked for, the last state.

    chunked: whether to compute in chunks by matrix products, which holds fewer states and is several times faster on
    CPUs where n is not small; None decides by that. The last state comes from the scan alone.
    """
    _check(x)
    if chunked is None:
        chunked = not last_state and x.u.device.type == "cpu" and x.B.shape[-1] >= LEAST_STATES
    if not chunked or x.u.numel() == 0:
        return _by_scan(x, last_state)
    if last_state:
        raise ConfigError("the chunked form has no last state; leave chunked to None")
    dtype = compute_dtype(x.u, x.delta, x.A, x.B, x.C)
    B, C = ((rows if rows.dim() == 4 else rows.unsqueeze(2)).to(dtype) for rows in (x.B, x.C))
    with torch.autocast(x.u.device.type, enabled=False):
        u, delta = x.u.to(dtype), x._replace(delta=x.delta.to(dtype)).steps()
        y = chunked_scan(u, delta, x.A.to(dtype), B, C, runs(x.seq_idx))
        if x.D is not None:
            y = torch.addcmul(y, u, x.per_channel(x.D.to(dtype)))
        if x.z is not None:
            y = y * F.silu(x.z.to(dtype))
    return ScanOutput(y.to(x.u.dtype))


def _by_scan(x: HeadInputs, last_state: bool) -> ScanOutput:
    n = x.B.shape[-1]
    inputs = ScanInputs(
        u=x.u,
        delta=x.per_channel(x.delta),
        A=x.per_channel(x.A)[:, None].expand(-1, n),
        B=x.B,
        C=x.C,
        D=None if x.D is None else x.per_channel(x.D),
        z=x.z,
        delta_bias=None if x.delta_bias is None else x.per_channel(x.delta_bias),
        delta_softplus=x.delta_softplus,
        seq_idx=x.seq_idx,
    )
    return scan(inputs, last_state=last_state)


def _check(x: HeadInputs) -> None:
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
