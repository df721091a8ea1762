"""Statistics of calibration data for `compress`: scores of states, and the least squares for the C that remains."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from infssm.ops import ScanInputs
from infssm.ops.scan import step_size
from infssm.ssm.hidden import walk_states

Score = Literal["output", "last", "magnitude"]
MOST_UNKNOWNS = 1024
"""The refit of a scan direction has kept times pruned states as unknowns, and a matrix of their square: 8 MB at this
many, which is half of 64 states. Above it C stays as it is, and training brings the model back."""


class Scores:
    """The sum over tokens of the scores of one scan direction's states, ``[groups, n]``; Mamba has one group."""

    def __init__(self, kind: Score) -> None:
        self.kind = kind
        self.total = torch.zeros((), dtype=torch.float64)

    def add(self, x: ScanInputs, mask: Tensor | None) -> None:
        """Add the tokens of a scan, the mean over channels that share B and C; mask: [batch, tokens]."""
        # A step size that underflows would make both scores 0 / 0.
        delta = step_size(x.delta, x.delta_bias, x.delta_softplus).clamp_min(1e-12).unsqueeze(-1)
        A = x.A if x.A.ndim == 2 else x.A.unsqueeze(-1)  # Mamba-2 has one transition per head
        gain = (
            (x.B * x.C).square() if x.B.ndim == 4 else (x.B * x.C).square().unsqueeze(2)
        )  # [batch, tokens, groups, n]
        if mask is not None:
            gain = gain * mask[..., None, None]
        for t in range(x.u.shape[1]):  # token by token: all of them would be n times as large as the activations
            exponent, square = delta[:, t] * A, delta[:, t].square()  # [batch, channels, n], [batch, channels, 1]
            energy = square / (-torch.expm1(2 * exponent) if self.kind == "output" else torch.expm1(exponent).square())
            mean = torch.unflatten(energy, 1, (gain.shape[2], -1)).mean(2)
            self.total = self.total.to(mean.device) + (gain[:, t] * mean).sum(0).double()


class Refit:
    """Least squares for P [k, n - k]: C_keep + P C_rest reads from the kept states what comes nearest to all states.

    The unknown P_ij multiplies C_j h_i, with i kept and j not; the target is the sum of C_l h_l over the rest l. The
    normal equations need only sums over tokens and channels. P is zero where there are too many unknowns.
    """

    def __init__(self, keep: Tensor, n: int) -> None:
        self.keep, self.rest = keep, rest_of(keep, n)
        k, r = len(keep), len(self.rest)
        self.right = torch.zeros(k, r, dtype=torch.float64, device=keep.device)
        self.left = self.right.new_zeros(k * k, r * r) if k * r <= MOST_UNKNOWNS else None

    def add(self, x: ScanInputs, mask: Tensor | None) -> None:
        """Add the tokens of a scan; mask: [batch, tokens]."""
        if self.left is None:
            return
        for t, h in walk_states(x):
            c = x.C[:, t, self.rest].double()  # [batch, n - k]
            kept, rest = h[..., self.keep].double(), h[..., self.rest].double()  # [batch, channels, ...]
            if mask is not None:
                c = c * mask[:, t, None]
            gram, outer = kept.mT @ kept, c.unsqueeze(2) * c.unsqueeze(1)
            wanted = (kept.mT @ (rest @ c.unsqueeze(2))).squeeze(2)  # [batch, k]
            self.left += gram.flatten(1).mT @ outer.flatten(1)  # [(i i'), (j j')]
            self.right += wanted.mT @ c  # [i, j]

    def solve(self) -> Tensor:
        """P."""
        if self.left is None:
            return self.right
        k, r = self.right.shape
        left = self.left.view(k, k, r, r).transpose(1, 2).reshape(k * r, k * r)  # [(i j), (i' j')]
        ridge = 1e-6 * left.diagonal().mean().clamp_min(torch.finfo(left.dtype).tiny)
        solved: Tensor = torch.linalg.solve(left + ridge * torch.eye(k * r).to(left), self.right.flatten())
        return solved.view(k, r)


def rest_of(keep: Tensor, n: int) -> Tensor:
    """The indices below n that are not among ``keep``, in order."""
    rest = torch.ones(n, dtype=torch.bool, device=keep.device)
    rest[keep] = False
    return rest.nonzero().squeeze(1)
