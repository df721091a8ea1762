"""The distances of this library against formulations in PyTorch, forward and backward from raw states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infssm.ops import System, fused_distance, sampled_output


class DistanceProblem:
    """Raw old and new states of `tokens` tokens."""

    def __init__(self, tokens: int, n: int) -> None:
        torch.manual_seed(0)
        self.old = torch.rand(tokens, n), torch.randn(tokens, n)
        self.new = torch.rand(tokens, n, requires_grad=True), torch.randn(tokens, n, requires_grad=True)
        self.inputs = {"old_b": torch.randn(tokens, n), "new_b": torch.randn(tokens, n, requires_grad=True)}

    def ours(self, kind: str, backend: str | None = None) -> None:
        inputs = self.inputs if kind == "output" else {}  # the one kind here that sees b
        self._backward(fused_distance(*self.old, *self.new, kind=kind, backend=backend, **inputs))

    def sampled(self, frequencies: int) -> None:
        """`output` of the same systems by samples of the transfer functions, in float64."""
        sides = (*self.old, self.inputs["old_b"]), (*self.new, self.inputs["new_b"])
        old, new = (System(*(torch.tanh(x / 2) for x in side)) for side in sides)
        self._backward(sampled_output(old, new, frequencies=frequencies))

    def formula(self, function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        self._backward(function(*(torch.tanh(tensor / 2) for tensor in (*self.old, *self.new))))

    def _backward(self, value: Tensor) -> None:
        torch.autograd.grad(value.mean(), (*self.new, self.inputs["new_b"]), allow_unused=True)


def gram(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    return c.unsqueeze(-1) * d.unsqueeze(-2) / (1 - a.unsqueeze(-1) * b.unsqueeze(-2))


def joint_gram(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """`simplified` through one 2n x 2n Gram of both systems per token."""
    n = a.shape[-1]
    poles, rows = torch.cat([a, b], -1), torch.cat([c, d], -1)
    joint = gram(poles, rows, poles, rows)
    old, cross, new = joint[:, :n, :n], joint[:, :n, n:], joint[:, n:, n:]
    traces = old.diagonal(dim1=-2, dim2=-1).sum(-1) * new.diagonal(dim1=-2, dim2=-1).sum(-1)
    return 1 - (cross @ cross.mT).diagonal(dim1=-2, dim2=-1).sum(-1) / traces


def three_grams(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """`simplified` through three n x n Grams."""
    old, cross, new = gram(a, c, a, c), gram(a, c, b, d), gram(b, d, b, d)
    traces = old.diagonal(dim1=-2, dim2=-1).sum(-1) * new.diagonal(dim1=-2, dim2=-1).sum(-1)
    return 1 - cross.square().sum((-2, -1)) / traces


def closed_form(a: Tensor, c: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """`simplified` through one n x n reduction and two sums."""
    inverse = (1 - a.unsqueeze(-1) * b.unsqueeze(-2)).reciprocal()
    cross = (c.square().unsqueeze(-2) @ (inverse * inverse) @ d.square().unsqueeze(-1)).flatten()
    return 1 - cross / ((c * c / (1 - a * a)).sum(-1) * (d * d / (1 - b * b)).sum(-1))


def determinants(a: Tensor, _: Tensor, b: Tensor, __: Tensor) -> Tensor:
    """`martin` as -log(det(G12)^2 / (det G11 det G22)) by LU factorisation."""
    ones = torch.ones_like(a)
    old, cross, new = (gram(x, ones, y, ones) for x, y in ((a, a), (a, b), (b, b)))
    logdet = [torch.linalg.slogdet(matrix)[1] for matrix in (old, cross, new)]
    return logdet[0] + logdet[2] - 2 * logdet[1]
