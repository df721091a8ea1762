"""The lattice of rotations that has the principal angles, and the geodesic distance by all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infssm.ops.registered.library import define, differentiate, given, matrix, native, new


def _lattice_fake(old_a: Tensor, new_a: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = (*old_a.shape, old_a.shape[-1])
    return new(old_a, *shape), new(old_a, *shape)


def _lattice(old_a: Tensor, new_a: Tensor) -> tuple[Tensor, Tensor]:
    sine, cosine = outputs = _lattice_fake(old_a, new_a)
    native.lattice_forward(matrix(old_a), matrix(new_a), torch.get_num_threads(), _cube(sine), _cube(cosine))
    return outputs


def _lattice_backward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    old_a = args[0]
    return new(old_a, *old_a.shape), new(old_a, *old_a.shape)


def _lattice_backward(*args: Any) -> tuple[Tensor, Tensor]:
    old_a, new_a, *matrices = args
    slopes = _lattice_backward_fake(old_a)
    cubes = (_cube(given(tensor)) for tensor in matrices)
    threads = torch.get_num_threads()
    native.lattice_backward(matrix(old_a), matrix(new_a), threads, *cubes, *(matrix(slope) for slope in slopes))
    return slopes


def _cube(tensor: Tensor | None) -> Tensor | None:
    """The tensor as contiguous matrices [-1, n, n], or None."""
    return None if tensor is None else tensor.contiguous().view(-1, *tensor.shape[-2:])


def _lattice_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _lattice_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    slopes = lattice_backward(*ctx.saved_tensors, *grads)
    return tuple(slope if need else None for slope, need in zip(slopes, ctx.needs_input_grad, strict=True))


lattice = define("lattice(Tensor old_a, Tensor new_a) -> (Tensor, Tensor)", _lattice, _lattice_fake)
lattice_backward = define(
    "lattice_backward(Tensor old_a, Tensor new_a, Tensor sine, Tensor cosine, Tensor? grad_sine,"
    " Tensor? grad_cosine) -> (Tensor, Tensor)",
    _lattice_backward,
    _lattice_backward_fake,
)
differentiate("lattice", _lattice_autograd, _lattice_setup)


def by_every_angle(old_a: Tensor, new_a: Tensor, soft: bool) -> tuple[Tensor, ...]:
    """Geodesic distance of systems [rows, n] and its derivatives by singular value decompositions of the lattice."""
    sides = [(torch.tanh(side / 2) if soft else side).sort(dim=-1) for side in (old_a, new_a)]
    poles = [side.values for side in sides]
    sine, cosine = lattice(*poles)
    (u, s, v), (x, c, y) = torch.linalg.svd(sine), torch.linalg.svd(cosine)
    c = c.flip(-1)
    theta = torch.atan2(s, c)
    by_sine, by_cosine = 2 * theta * c, (-2 * theta * s).flip(-1)
    grads = ((u * by_sine.unsqueeze(-2)) @ v, (x * by_cosine.unsqueeze(-2)) @ y)
    slopes = lattice_backward(*poles, sine, cosine, *grads)
    if soft:
        slopes = [slope * (1 - pole.square()) / 2 for slope, pole in zip(slopes, poles, strict=True)]
    back = (
        torch.empty_like(a).scatter_(-1, side.indices, slope)
        for a, side, slope in zip(poles, sides, slopes, strict=True)
    )
    return theta.square().sum(-1), *back
