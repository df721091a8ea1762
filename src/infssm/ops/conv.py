"""Causal depthwise convolution with bias and SiLU in the layout of the scan."""

from __future__ import annotations

from torch import Tensor

from infssm.ops import reference as _reference
from infssm.ops import registered as _ops
from infssm.ops.backend import choose, maybe_single, single
from infssm.ops.checks import expect_floats, expect_rank, expect_shape
from infssm.ops.records import ConvInputs, runs


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Convolve each channel over its past tokens (`reverse`: its future tokens), then SiLU.

    x: [batch, tokens, channels], any strides; weight: [channels, width]; bias: [channels].
    weight[:, -1] multiplies the token itself. Returns [batch, tokens, channels].
    seq_idx: [batch, tokens], for rows that hold several sequences: no tap reaches over a change of the number.
    """
    expect_rank("x", x, "batch, tokens, channels")
    expect_rank("weight", weight, "channels, width")
    expect_floats(("x", "weight", "bias"), (x, weight, bias))
    expect_shape("weight", weight, (x.shape[2], weight.shape[1]))
    expect_shape("bias", bias, (x.shape[2],))
    expect_shape("seq_idx", seq_idx, x.shape[:2])
    chosen = choose(backend, x, weight, bias)
    if chosen == "reference":
        return _reference.causal_conv1d(ConvInputs(x, weight, bias, silu, reverse, runs(seq_idx)))
    inputs = ConvInputs(single(x), single(weight), maybe_single(bias), silu, reverse, runs(seq_idx))
    y: Tensor = _ops.conv(*inputs, chosen == "triton")
    return y.to(x.dtype)
