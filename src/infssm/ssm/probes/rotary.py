"""Systems whose states turn: queries and keys that are rotated by an angle that grows from token to token.

In the frame that turns along, a pair (k0, k1) of key channels is the complex number z = k0 + i k1, and the inner
product of a query with a key written j tokens ago is `Re(conj(z_q) z_k e^(-ij angle))`: two conjugate poles for each
pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.ssm.space import StateSpace


def rotated(
    decay: Tensor,
    angles: Tensor,
    q: tuple[Tensor, Tensor],
    k: tuple[Tensor, Tensor],
    mask: Tensor | None = None,
    *,
    extra: tuple[Tensor, Tensor] | None = None,
) -> StateSpace:
    """Complex systems of pairs (q0, q1), (k0, k1): [..., pairs], with poles ``decay e^(-+ i angles)``, both broadcast.

    extra: poles and residues [..., m] of real states beside them.
    """
    zq, zk = (torch.complex(*pair) for pair in (q, k))
    half = torch.polar(decay.expand(zq.shape).contiguous(), -angles.expand(zq.shape).contiguous())
    poles = [half, half.conj()]
    rows, columns = [zq.conj(), zq], [zk / 2, zk.conj() / 2]
    if extra is not None:
        poles.append(extra[0] + 0j)
        rows.append(extra[1] + 0j)
        columns.append(torch.ones_like(rows[-1]))
    a, c, b = (torch.cat(parts, dim=-1) for parts in (poles, rows, columns))
    return StateSpace(a, c, b, mask)
