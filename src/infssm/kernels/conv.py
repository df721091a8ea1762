"""Causal depthwise convolution with bias and SiLU in the layout of the scan."""

from __future__ import annotations

from torch import Tensor

from infssm.kernels import _reference
from infssm.kernels._checks import expect_rank, expect_shape
from infssm.kernels._operators import operators
from infssm.kernels.backend import maybe_single, single


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    reverse: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Convolve each channel over its past tokens (`reverse`: its future tokens), then SiLU.

    x: [batch, tokens, channels], any strides; weight: [channels, width]; bias: [channels].
    weight[:, -1] multiplies the token itself. Returns [batch, tokens, channels].
    """
    expect_rank("x", x, "batch, tokens, channels")
    expect_rank("weight", weight, "channels, width")
    expect_shape("weight", weight, (x.shape[2], weight.shape[1]))
    expect_shape("bias", bias, (x.shape[2],))
    ops = operators(backend, x, weight, bias)
    if ops is not None:
        y: Tensor = ops.conv(single(x), single(weight), maybe_single(bias), silu, reverse)
        return y.to(x.dtype)
    return _reference.causal_conv1d(x, weight, bias, silu, reverse)
