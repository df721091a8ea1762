"""`output` by sampled frequencies, for transitions that are diagonal plus low rank (docs/reference/maths.md).

The energy of a difference of impulse responses is the mean of ``|H(w) - H'(w)|^2`` over the unit circle, where
``H(w) = c (1 - w A)^-1 b``. With ``A = diag(a) + sum_k u_k v_k^T`` the resolvent costs O(n) per frequency (Woodbury),
no poles are needed, and the two systems may differ in size and kind.

Evenly spaced frequencies on the circle see the first F steps, aliased: the error is ``|pole|^F``, so that poles of
0.999 would need thousands. A bilinear map of the disc onto itself, with a scale s, therefore moves a pole
``a = (1 - r) / (1 + r)`` to ``p = (s - r) / (s + r)`` first, which leaves the energy as it is. With s the geometric
mean of the extreme r, poles from 0.5 to 0.999 have an error of 5e-5 at F = 128 and 2e-9 at F = 256.

A sum over states, ``sum_i x_i / (1 - p_i z)``, at the F points with ``z^F = -1`` is the discrete Fourier transform of
``h_t = sum_i x_i p_i^t / (1 + p_i^F)``. With ``t = i + 16 j`` that is one product of matrices of 16 and of F / 16
powers, which takes about half of the time of F resolvents for every state.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.ops.checks import compute_dtype
from infssm.ops.distances._matrices import abs2, real
from infssm.ops.distances._pair import in_float64
from infssm.ops.distances.pieces import piecewise


class System(NamedTuple):
    """Systems with ``A = diag(a) + sum_k u_k v_k^T``: a, b, c: ``[..., n]``; u, v: ``[..., rank, n]`` or None."""

    a: Tensor
    c: Tensor
    b: Tensor
    u: Tensor | None = None
    v: Tensor | None = None


def sampled_output(old: System, new: System, *, frequencies: int = 128) -> Tensor:
    """Energy of the difference of the two impulse responses, ``[...]``, from samples of the transfer functions.

    The leading dimensions of old and new are equal; n and the rank may differ. Computed in float64; 0 with gradient 0
    where both systems are the same. The transition must be stable: nothing here would notice that it is not.
    """
    if frequencies < 2 or frequencies % 2:
        raise ConfigError(f"distance: frequencies={frequencies}; give an even number of at least 2")
    tensors: list[Tensor | None] = [*old, *new]
    dtype = compute_dtype(*tensors)
    # Many systems at once, as most operations are on a few values for each of them.
    elements = max(1, frequencies * max(old.c.shape[-1], new.c.shape[-1]) // 32)

    def energy(*parts: Tensor | None) -> Tensor:
        return _energy(System(*parts[:5]), System(*parts[5:]), frequencies)  # type: ignore[arg-type]

    with torch.autocast(old.c.device.type, enabled=False):
        value = piecewise(energy, tensors, old.c.shape[:-1], elements)
    return value.to(dtype.to_real() if dtype.is_complex else dtype)


def _energy(old: System, new: System, frequencies: int) -> Tensor:
    old, new = (System(*(None if x is None else in_float64(x) for x in system)) for system in (old, new))  # type: ignore[arg-type]
    scale = _scale(old, new)
    was, now = (_sequences(system, scale, frequencies) for system in (old, new))
    if old.u is None and new.u is None:  # the mean over samples is the sum over t
        return 4 * scale.squeeze(-1) * abs2(now - was).sum((-2, -1))
    if not was.is_complex() and not now.is_complex():
        # The samples of a real system at conjugate points are conjugate: the F / 2 points with z^(F / 2) = -i serve.
        was, now = (torch.complex(*x.chunk(2, dim=-1)).conj() for x in (was, now))
    gap = _samples(now, new, scale, frequencies) - _samples(was, old, scale, frequencies)
    return 4 * scale.squeeze(-1) * abs2(gap).mean(-1)


def _scale(old: System, new: System) -> Tensor:
    """The geometric mean of the smallest and the largest |r| of both systems, ``[..., 1]``; only precision needs it.

    The poles of a system with a low-rank part are not known: they are taken to reach as far below a as its trace is.
    """
    low, high = [], []
    for a, _, _, u, v in (old, new):
        poles = a.detach()
        r = _half_plane(poles)
        # An entry of 1, as of a layer without decay, is no pole that the input reaches, or the energy is infinite.
        low.append(r.masked_fill(r <= 1e-6, torch.inf).amin(-1, keepdim=True))
        if u is not None and v is not None and not poles.is_complex():
            pull = real((u * v).detach()).sum((-2, -1)).unsqueeze(-1)
            poles = (poles + pull.clamp_max(0)).clamp_min(-0.9)
        high.append(_half_plane(poles).amax(-1, keepdim=True))
    least, most = torch.minimum(*low), torch.maximum(*high)
    return (torch.where(least.isfinite(), least, most) * most).sqrt()


def _half_plane(poles: Tensor) -> Tensor:
    """|r| of poles."""
    return ((1 - poles).abs() / (1 + poles).abs().clamp_min(1e-6)).clamp_min(1e-6)


def _sequences(system: System, scale: Tensor, frequencies: int) -> Tensor:
    """``h_t`` of (c, b), (c, u), (v, b) and (v, u), ``[..., 1 + 2 rank + rank^2, F]``."""
    a, c, b, u, v = system
    far = scale * (1 + a)
    gain = torch.reciprocal(1 - a + far)
    p = (far - (1 - a)) * gain
    x = (c * b).unsqueeze(-2)
    if u is not None and v is not None:
        products = v.unsqueeze(-2) * u.unsqueeze(-3)  # [..., rank of v, rank of u, n]
        x = torch.cat([x, c.unsqueeze(-2) * u, v * b.unsqueeze(-2), products.flatten(-3, -2)], dim=-2)
    count = math.gcd(frequencies, 16)
    low = _powers(p, count)
    step = low[..., -1, :] * p
    high = _powers(step, frequencies // count)
    gain = gain / (1 + high[..., -1, :] * step)
    left = (x * gain.unsqueeze(-2)).unsqueeze(-2) * high.unsqueeze(-3)  # [..., sequences, F / count, n]
    return torch.unflatten(left.flatten(-3, -2) @ low.mT, -2, left.shape[-3:-1]).flatten(-2)


def _powers(p: Tensor, count: int) -> Tensor:
    """1, p, p^2, ..., by doubling: ``[..., n] -> [..., count, n]``."""
    found, step = torch.ones_like(p).unsqueeze(-2), p.unsqueeze(-2)
    while found.shape[-2] < count:
        found, step = torch.cat([found, found * step], dim=-2), step.square()
    return found[..., :count, :]


def _samples(h: Tensor, system: System, scale: Tensor, frequencies: int) -> Tensor:
    """The transfer function at the F or F / 2 points z whose powers h was folded for, without the gain of the map."""
    t = torch.arange(h.shape[-1], dtype=scale.dtype, device=h.device)
    turn = torch.polar(torch.ones_like(t), -math.pi / frequencies * t)
    sums: Tensor = torch.fft.fft(h * turn)
    if system.u is None:
        return sums.squeeze(-2)
    z = torch.polar(torch.ones_like(t), -math.pi / frequencies - 2 * math.pi / len(t) * t)
    back = ((1 - scale) + (1 + scale) * z).unsqueeze(-2)
    rank = system.u.shape[-2]
    direct, read, write, loop = torch.split(sums, [1, rank, rank, rank * rank], dim=-2)
    if rank == 1:
        return (direct + back * read * write / (1 - back * loop)).squeeze(-2)
    inside = torch.eye(rank, dtype=sums.dtype, device=h.device) - torch.unflatten((back * loop).mT, -1, (rank, rank))
    solved = torch.linalg.solve(inside, write.mT.unsqueeze(-1)).squeeze(-1)
    found: Tensor = (direct + back * (read * solved.mT).sum(-2, keepdim=True)).squeeze(-2)
    return found
