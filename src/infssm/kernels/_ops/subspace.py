"""Chordal and geodesic distance, and the lattice of rotations that has the principal angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infssm.kernels._ops._library import define, differentiate, given, keep_slopes, matrix, native, new, times_slopes


def _fake(*args: Any) -> tuple[Tensor, ...]:
    old_a, _, _, to_old, to_new = args
    slopes = (new(old_a, *(old_a.shape if wanted else (0,))) for wanted in (to_old, to_new))
    return new(old_a, *old_a.shape[:-1]), *slopes


def _call(kernel: Callable[..., None], args: tuple[Any, ...], outputs: tuple[Tensor, ...], *more: Tensor) -> None:
    old_a, new_a, raw, to_old, to_new = args
    value, *slopes = outputs
    wanted = (matrix(slope) if want else None for slope, want in zip(slopes, (to_old, to_new), strict=True))
    kernel(matrix(old_a), matrix(new_a), raw, torch.get_num_threads(), value.view(-1), *wanted, *more)


def _chordal(*args: Any) -> tuple[Tensor, ...]:
    outputs = _fake(*args)
    _call(native.chordal, args, outputs)
    return outputs


def _geodesic(*args: Any) -> tuple[Tensor, ...]:
    outputs = _fake(*args)
    sure = torch.empty_like(outputs[0]).view(-1)
    _call(native.geodesic, args, outputs, sure)
    if not sure.all():
        _mend(outputs, (sure == 0).nonzero().squeeze(-1), *args[:3])
    return outputs


def _mend(outputs: tuple[Tensor, ...], unsure: Tensor, old_a: Tensor, new_a: Tensor, raw: bool) -> None:
    old_a, new_a = (side.reshape(-1, side.shape[-1]) for side in (old_a, new_a))
    for rows in torch.split(unsure, max(1, _ELEMENTS // old_a.shape[-1] ** 2)):
        for output, found in zip(outputs, _by_every_angle(old_a[rows], new_a[rows], raw), strict=True):
            if output.numel():
                output.view(-1, *found.shape[1:])[rows] = found


_ELEMENTS = 2**22
"""Of the matrices of systems that are done at a time by every angle."""


def _by_every_angle(old_a: Tensor, new_a: Tensor, raw: bool) -> tuple[Tensor, ...]:
    """Geodesic distance of systems [rows, n] and its derivatives by singular value decompositions of the lattice."""
    sides = [(torch.tanh(side / 2) if raw else side).sort(dim=-1) for side in (old_a, new_a)]
    poles = [side.values for side in sides]
    sine, cosine = lattice(*poles)
    (u, s, v), (x, c, y) = torch.linalg.svd(sine), torch.linalg.svd(cosine)
    c = c.flip(-1)
    theta = torch.atan2(s, c)
    by_sine, by_cosine = 2 * theta * c, (-2 * theta * s).flip(-1)
    grads = ((u * by_sine.unsqueeze(-2)) @ v, (x * by_cosine.unsqueeze(-2)) @ y)
    slopes = lattice_backward(*poles, sine, cosine, *grads)
    if raw:
        slopes = [slope * (1 - pole.square()) / 2 for slope, pole in zip(slopes, poles, strict=True)]
    back = (
        torch.empty_like(a).scatter_(-1, side.indices, slope)
        for a, side, slope in zip(poles, sides, slopes, strict=True)
    )
    return theta.square().sum(-1), *back


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    return (*times_slopes(ctx, grad, ctx.needs_input_grad[:2]), None, None, None)


_SCHEMA = "(Tensor old_a, Tensor new_a, bool raw, bool to_old, bool to_new) -> (Tensor, Tensor, Tensor)"
chordal = define(f"chordal{_SCHEMA}", _chordal, _fake)
geodesic = define(f"geodesic{_SCHEMA}", _geodesic, _fake)
for _name in ("chordal", "geodesic"):
    differentiate(_name, _autograd, keep_slopes)


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
