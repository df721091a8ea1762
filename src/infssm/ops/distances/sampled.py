"""`output` by sampled frequencies, for transitions that are diagonal plus low rank (docs/reference/maths.md).

The energy of a difference of impulse responses is the mean of ``|H(w) - H'(w)|^2`` over the unit circle, where
``H(w) = c (1 - w A)^-1 b``. With ``A = diag(a) + sum_k u_k v_k^T`` the resolvent costs O(n) per frequency (Woodbury),
no poles are needed, and the two systems may differ in size and kind.

Evenly spaced frequencies on the circle see the first F steps, aliased: the error is ``|pole|^F``, so that poles of
0.999 would need thousands. In the half-plane (`_pair.py`), where ``w = (1 - iy) / (1 + iy)``, the same rule may be
scaled: ``y = s tan(phi / 2)`` with evenly spaced phi has the error ``|(r - s) / (r + s)|^F`` for a pole at r. With s
the geometric mean of the extreme r, poles from 0.5 to 0.999 have an error of 5e-5 at F = 128 and 2e-9 at F = 256.
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
from infssm.ops.distances.pieces import CPU_ELEMENTS, DEVICE_ELEMENTS, Pieces


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
    lead, limit = old.c.shape[:-1], CPU_ELEMENTS if old.c.device.type == "cpu" else DEVICE_ELEMENTS
    size = max(1, limit // (frequencies // 2 * max(old.c.shape[-1], new.c.shape[-1])))

    def energy(*parts: Tensor | None) -> Tensor:
        return _energy(System(*parts[:5]), System(*parts[5:]), frequencies)  # type: ignore[arg-type]

    with torch.autocast(old.c.device.type, enabled=False):
        if torch.compiler.is_compiling() or lead.numel() <= size:
            value = energy(*tensors)
        else:
            flat = [None if x is None else x.reshape(-1, *x.shape[len(lead) :]) for x in tensors]
            if not torch.is_grad_enabled():
                flat = [None if x is None else x.detach() for x in flat]
            value = Pieces.apply(energy, size, *flat).reshape(lead)  # type: ignore[no-untyped-call]
    return value.to(dtype.to_real() if dtype.is_complex else dtype)


def _energy(old: System, new: System, frequencies: int) -> Tensor:
    old, new = (System(*(None if x is None else in_float64(x) for x in system)) for system in (old, new))  # type: ignore[arg-type]
    is_complex = any(x is not None and x.is_complex() for x in (*old, *new))
    scale = _scale(old, new)
    # The transfer function of a real system at -y is the conjugate of that at y: half of the samples serve.
    count = frequencies if is_complex else frequencies // 2
    angles = (torch.arange(count, dtype=scale.dtype, device=scale.device) + 0.5) * (math.pi / frequencies)
    tangents = torch.tan(angles)
    y = scale * tangents
    gap = _transfer(new, y) - _transfer(old, y)
    return (scale.squeeze(-1) / count) * ((1 + tangents.square()) * abs2(gap)).sum(-1)


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


def _transfer(system: System, y: Tensor) -> Tensor:
    """``H(w) / (1 + iy)``, ``[..., F]``, at ``w = (1 - iy) / (1 + iy)``; y: ``[..., F]``."""
    a, c, b, u, v = system
    r = (1 - a) / (1 + a)
    half = (1 + r) / 2
    pairs = [(c * b * half).unsqueeze(-2)]
    rank = 0
    if u is not None and v is not None:
        rank = u.shape[-2]
        c, b, half = (x.unsqueeze(-2) for x in (c, b, half))
        products = (v * half).unsqueeze(-2) * u.unsqueeze(-3)  # [..., rank of v, rank of u, n]
        pairs += [c * u * half, v * b * half, products.flatten(-3, -2)]
    sums = _resolvent(r, y, torch.cat(pairs, dim=-2))
    if not rank:
        return sums.squeeze(-1)
    back = torch.complex(torch.ones_like(y), -y).unsqueeze(-1)
    direct, read, write, loop = torch.split(sums, [1, rank, rank, rank * rank], dim=-1)
    if rank == 1:
        return (direct + back * read * write / (1 - back * loop)).squeeze(-1)
    inside = torch.eye(rank, dtype=sums.dtype, device=y.device) - back.unsqueeze(-1) * torch.unflatten(
        loop, -1, (rank, rank)
    )
    solved = torch.linalg.solve(inside, write.unsqueeze(-1)).squeeze(-1)
    found: Tensor = direct.squeeze(-1) + back.squeeze(-1) * (read * solved).sum(-1)
    return found


def _resolvent(r: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """``sum_i x_ki / (r_i + i y_f)``: ``[..., n], [..., F], [..., k, n] -> [..., F, k]``, complex."""
    if r.is_complex() or x.is_complex():
        poles = r.to(torch.promote_types(r.dtype, torch.complex64)).unsqueeze(-2)
        return torch.reciprocal(poles + torch.complex(torch.zeros_like(y), y).unsqueeze(-1)) @ x.to(poles.dtype).mT
    kernel = torch.reciprocal(r.square().unsqueeze(-2) + y.square().unsqueeze(-1))
    both = kernel @ torch.cat([x * r.unsqueeze(-2), x], dim=-2).mT
    even, odd = both.chunk(2, dim=-1)
    return torch.complex(even, -y.unsqueeze(-1) * odd)
