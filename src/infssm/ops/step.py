"""The selective scan of a single token in plain PyTorch: a recurrent step has nothing to gain from a scan kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.ops.checks import compute_dtype
from infssm.ops.scan import ScanInputs, ScanOutput, step_size


def scan_step(x: ScanInputs) -> ScanOutput:
    """What `scan` (or, with one transition per head, `scan_ssd`) returns for one token: y and the state after it.

    x: as of the scan with tokens = 1 and an `initial_state: [batch, channels, n]`; as of `scan_ssd`, delta may be
    [batch, 1, heads] with A, D, delta_bias: [heads].
    """
    assert x.initial_state is not None
    dtype = compute_dtype(x.u, x.delta, x.A, x.B, x.C)
    batch, heads, n = len(x.u), x.delta.shape[-1], x.B.shape[-1]
    u = x.u.to(dtype).view(batch, heads, -1)  # [batch, heads, channels of a head], like everything below
    dt = step_size(x.delta[:, 0].to(dtype), x.delta_bias, x.delta_softplus).unsqueeze(-1)
    A = x.A.to(dtype).view(heads, -1)
    b, c = (_by_head(tensor.to(dtype), heads) for tensor in (x.B, x.C))
    h = x.initial_state.to(dtype).view(batch, heads, -1, n)
    h = torch.addcmul((dt * A).exp().unsqueeze(2) * h, (dt * u).unsqueeze(-1), b)
    y = (h * c).sum(-1)
    if x.D is not None:
        y = y + x.D.unsqueeze(-1) * u
    y = y.view(x.u.shape)
    if x.z is not None:
        y = y * F.silu(x.z.to(dtype))
    return ScanOutput(y.to(x.u.dtype), h.view(x.initial_state.shape))


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """[batch, 1, n] or [batch, 1, groups, n] -> [batch, heads or 1, 1, n]."""
    rows = rows[:, 0]
    if rows.dim() == 2:
        return rows[:, None, None]
    return rows.repeat_interleave(heads // rows.shape[1], dim=1).unsqueeze(2)
