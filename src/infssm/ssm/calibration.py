"""What `compress` gathers over calibration data: scores of states, and the least squares for the C that remains."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from infssm.ops import ScanInputs
from infssm.ops.scan import step_size
from infssm.ssm.hidden import walk_states
from infssm.ssm.space import StateSpace

Score = Literal["output", "last", "magnitude"]
MOST_UNKNOWNS = 1024
"""The refit of a scan direction has kept times pruned states as unknowns, and a matrix of their square: 8 MB at this
many, which is half of 64 states. Above it C stays as it is, and training brings the model back."""


class Scores:
    """Sums over tokens of one scan direction; output, last: [..., n]."""

    def __init__(self) -> None:
        self.output: Tensor | float = 0.0
        self.last: Tensor | float = 0.0

    def of(self, kind: Score) -> Tensor:
        """The sums of one score."""
        found = self.output if kind == "output" else self.last
        assert isinstance(found, Tensor)
        return found

    def add_scan(self, x: ScanInputs, mask: Tensor | None) -> None:
        """Add a selective scan: the energies of all channels' states, averaged over channels; mask: [batch, tokens]."""
        # A step size that underflows would make both scores 0 / 0.
        delta = step_size(x.delta, x.delta_bias, x.delta_softplus).clamp_min(1e-12).unsqueeze(-1)
        gain = (x.B * x.C).square()  # [batch, tokens, n]
        if mask is not None:
            gain = gain * mask.unsqueeze(-1)
        for t in range(x.u.shape[1]):  # token by token: all of them would be n times as large as the activations
            exponent, square = delta[:, t] * x.A, delta[:, t].square()  # [batch, channels, n], [batch, channels, 1]
            output = (square / -torch.expm1(2 * exponent)).mean(1)
            last = (square / torch.expm1(exponent).square()).mean(1)
            self.output = self.output + (gain[:, t] * output).sum(0).double()
            self.last = self.last + (gain[:, t] * last).sum(0).double()

    def add_heads(self, space: StateSpace) -> None:
        """Add the states of Mamba-2: a: [batch, tokens(, groups), 1]; b, c: [batch, tokens(, groups), n]."""
        assert space.b is not None
        a, gain = space.a, (space.c * space.b).square()
        if gain.ndim == 3:
            a, gain = a.unsqueeze(2), gain.unsqueeze(2)  # one group
        if space.mask is not None:
            gain = gain * space.mask[..., None, None]
        slow = (1 - a).clamp_min(torch.finfo(a.dtype).eps)  # a rounds to 1 where the step size is tiny
        self.output = self.output + (gain / (slow * (1 + a))).sum((0, 1)).double()
        self.last = self.last + (gain / slow.square()).sum((0, 1)).double()


class Refit:
    """Least squares for P [k, n - k]: C_keep + P C_rest reads from the kept states what comes nearest to all states.

    The unknown P_ij multiplies C_j h_i, with i kept and j not; the target is the sum of C_l h_l over the rest l. The
    normal equations need sums over tokens and channels alone.
    """

    def __init__(self, keep: Tensor, n: int) -> None:
        self.keep = keep
        self.rest = rest_of(keep, n)
        self.left: Tensor | float = 0.0
        self.right: Tensor | float = 0.0

    def add(self, x: ScanInputs, mask: Tensor | None) -> None:
        """Add the tokens of a scan; mask: [batch, tokens]."""
        if len(self.keep) * len(self.rest) > MOST_UNKNOWNS:
            return
        for t, h in walk_states(x):
            c = x.C[:, t, self.rest].double()  # [batch, n - k]
            kept, rest = h[..., self.keep].double(), h[..., self.rest].double()  # [batch, channels, ...]
            if mask is not None:
                c = c * mask[:, t, None]
            gram, outer = kept.mT @ kept, c.unsqueeze(2) * c.unsqueeze(1)
            wanted = (kept.mT @ (rest @ c.unsqueeze(2))).squeeze(2)  # [batch, k]
            self.left = self.left + gram.flatten(1).mT @ outer.flatten(1)  # [(i i'), (j j')]
            self.right = self.right + wanted.mT @ c  # [i, j]

    def solve(self) -> Tensor:
        """P; zero where there are too many unknowns."""
        shape = k, r = len(self.keep), len(self.rest)
        if not isinstance(self.left, Tensor) or not isinstance(self.right, Tensor):
            return torch.zeros(shape, dtype=torch.float64, device=self.keep.device)
        left = self.left.view(k, k, r, r).transpose(1, 2).reshape(k * r, k * r)  # [(i j), (i' j')]
        ridge = 1e-6 * left.diagonal().mean().clamp_min(torch.finfo(left.dtype).tiny)
        solved: Tensor = torch.linalg.solve(left + ridge * torch.eye(k * r).to(left), self.right.flatten())
        return solved.view(shape)


def rest_of(keep: Tensor, n: int) -> Tensor:
    """The indices below n that are not among ``keep``, in order."""
    return torch.tensor([i for i in range(n) if i not in set(keep.tolist())], device=keep.device)
