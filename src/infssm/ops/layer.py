"""A whole Mamba-2 layer in one call: input projection, what `projected` does, norm, output projection.

One call has one node in autograd's graph and no tensor between its parts is kept or copied that its backward does not
read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infssm.ops.directions import is_plain
from infssm.ops.heads import LEAST_STATES
from infssm.ops.projected import Between, HeadWeights, between_backward, between_forward
from infssm.ops.registered.library import flat, matrix, native, new


class LayerWeights(NamedTuple):
    """Parameters of a layer whose projections have no bias.

    in_proj: [inner + channels + heads, width]; heads: as of `scan_projected`; norm: [inner]; out_proj: [width, inner].
    """

    in_proj: Tensor
    heads: HeadWeights
    norm: Tensor
    out_proj: Tensor


class LayerSizes(NamedTuple):
    """Channels between the projections, groups of heads that share B and C, and the norm's epsilon."""

    inner: int
    groups: int
    eps: float


class Mixed(NamedTuple):
    """Output [batch, tokens, width], what was convolved [batch, tokens, channels], delta [batch, tokens, heads]."""

    y: Tensor
    convolved: Tensor
    delta: Tensor


def can_mix(hidden: Tensor, weights: LayerWeights, n: int) -> bool:
    """Whether `mix` serves: compiled kernels, plain float32 CPU tensors, and nothing tracing the model."""
    given = [weights.in_proj, *(w for w in weights.heads if w is not None), weights.norm, weights.out_proj]
    return n >= LEAST_STATES["cpu"] and weights.heads.conv_bias is not None and is_plain([hidden, *given])


def mix(hidden: Tensor, weights: LayerWeights, sizes: LayerSizes) -> Mixed:
    """The layer's output and what its states are made of; hidden: [batch, tokens, width]."""
    tensors = weights.in_proj, *weights.heads, weights.norm, weights.out_proj
    return Mixed(*_Layer.apply(sizes, torch.is_grad_enabled(), hidden, *tensors))  # type: ignore[no-untyped-call]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: LayerSizes, save: bool, hidden: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        in_proj, *heads, norm, out_proj = tensors
        batch, tokens, width = hidden.shape
        x = hidden.reshape(-1, width)
        projected = torch.mm(x, in_proj.t()).view(batch, tokens, -1)
        y, kept = between_forward(projected, HeadWeights(*heads), sizes.inner, sizes.groups, save=save)
        normed, scale, threads = new(y, batch * tokens, sizes.inner), new(y, batch * tokens), torch.get_num_threads()
        native.norm_forward(matrix(y), None, flat(norm), sizes.eps, threads, normed, None, scale)
        mixed = torch.mm(normed, out_proj.t()).view(hidden.shape)
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, x, *kept, y, normed, scale)
        return mixed, kept.convolved, projected[..., projected.shape[-1] - kept.A.shape[0] :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, of_convolved: Tensor | None, of_delta: Tensor | None) -> Any:
        in_proj, *heads, norm, out_proj, x, projected, convolved, A, plain, saved, y, normed, scale = ctx.saved_tensors
        _, _, of_hidden, of_in, *_, of_out = ctx.needs_input_grad
        dmixed: Tensor = torch.zeros_like(x) if grad is None else grad.reshape(x.shape)
        dnorm, dy = torch.empty_like(norm), torch.mm(dmixed, out_proj)
        native.norm_backward(matrix(y), flat(norm), torch.get_num_threads(), scale, dy, None, dy, dnorm)
        kept, weights = Between(projected, convolved, A, plain, saved), HeadWeights(*heads)
        sizes: LayerSizes = ctx.sizes
        dprojected, found = between_backward(kept, weights, sizes.inner, sizes.groups, dy.view_as(y), of_convolved)
        if of_delta is not None:
            dprojected[..., dprojected.shape[-1] - A.shape[0] :] += of_delta
        columns = dprojected.view(-1, in_proj.shape[0])
        dhidden = torch.mm(columns, in_proj).view(*projected.shape[:2], -1) if of_hidden else None
        din = torch.mm(columns.t(), x) if of_in else None
        return None, None, dhidden, din, *found, dnorm, torch.mm(dmixed.t(), normed) if of_out else None
