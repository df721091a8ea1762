"""What a scan reads and what it returns: one record each, from the public function down to the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ScanInputs(NamedTuple):
    """What a selective scan reads.

    u, delta, z: [batch, tokens, channels]; A: [channels, n] real; B, C: [batch, tokens, n] or
    [batch, tokens, groups, n]; D, delta_bias: [channels]; initial_state: [batch, channels, n];
    seq_idx: [batch, tokens], the number of the packed sequence a token belongs to: the state restarts where it changes.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    delta_bias: Tensor | None = None
    delta_softplus: bool = False
    reverse: bool = False
    initial_state: Tensor | None = None
    seq_idx: Tensor | None = None


class HeadInputs(NamedTuple):
    """What Mamba-2's scan in chunks reads.

    u, z: [batch, tokens, channels], the channels of the heads one after the other; delta: [batch, tokens, heads];
    A, D, delta_bias: [heads]; B, C: [batch, tokens, groups, n]; seq_idx: [batch, tokens] as of `ScanInputs`.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    delta_bias: Tensor | None = None
    delta_softplus: bool = False
    seq_idx: Tensor | None = None


class ScanStates(NamedTuple):
    """Means over the channels (of each group) of what a selective layer discretises, in token order.

    a: [batch, tokens, n] mean of exp(delta A); delta: [batch, tokens] mean of delta;
    zoh: [batch, tokens, n] mean of (exp(delta A) - 1) / A, or None. With groups: [batch, tokens, groups, n].
    """

    a: Tensor
    delta: Tensor
    zoh: Tensor | None = None

    def without_groups(self) -> ScanStates:
        """Without the group dimension of size 1."""
        zoh = None if self.zoh is None else self.zoh.squeeze(2)
        return ScanStates(self.a.squeeze(2), self.delta.squeeze(2), zoh)


class ScanOutput(NamedTuple):
    """What a selective scan returns; None for what was not asked for.

    y: [batch, tokens, channels]; last_state: [batch, channels, n]; states: see `ScanStates`.
    """

    y: Tensor
    last_state: Tensor | None = None
    states: ScanStates | None = None


class ConvInputs(NamedTuple):
    """What a causal convolution reads.

    x: [batch, tokens, channels]; weight: [channels, width]; bias: [channels]; seq_idx: [batch, tokens] as of the scan:
    no tap reaches into another sequence.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    silu: bool = True
    reverse: bool = False
    seq_idx: Tensor | None = None


def runs(seq_idx: Tensor | None) -> Tensor | None:
    """Packed sequences as the kernels read them: 0, 1, 2, ... along each row, float32 [batch, tokens].

    Two sequences of a row may have the same number as long as another lies between them.
    """
    if seq_idx is None:
        return None
    changes = (seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1)
    return torch.nn.functional.pad(changes, (1, 0)).float()
