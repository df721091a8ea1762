"""Hidden states of layers that scan, token by token, for analysis."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infssm.ops import ScanInputs
from infssm.ops.scan import step_size


def walk_states(x: ScanInputs) -> Iterator[tuple[int, Tensor]]:
    """Every token and the state after it, ``[batch, channels, n]``, in the order of the scan.

    Plain PyTorch. Takes what `selective_scan` takes, and what `scan_ssd` takes (a scalar transition per head: A is
    ``[heads]`` and delta ``[batch, tokens, heads]``).
    """
    channels, delta, A = x.u.shape[-1], step_size(x.delta, x.delta_bias, x.delta_softplus), x.A
    if A.ndim == 1:
        width = channels // len(A)
        delta, A = delta.repeat_interleave(width, dim=-1), A.repeat_interleave(width).unsqueeze(1)
    tokens = range(x.u.shape[1])
    previous, state = None, x.initial_state
    for t in reversed(tokens) if x.reverse else tokens:
        step, B = delta[:, t], x.B[:, t]
        # B is [batch, n], or [batch, groups, n] with as many channels to every group.
        B = B.unsqueeze(1) if B.ndim == 2 else B.repeat_interleave(channels // B.shape[1], dim=1)
        write = (step * x.u[:, t]).unsqueeze(-1) * B
        if state is None:
            state = write
        else:
            if x.seq_idx is not None and previous is not None:  # packed sequences begin with an empty state
                state = state * (x.seq_idx[:, t] == x.seq_idx[:, previous])[:, None, None]
            state = torch.exp(step.unsqueeze(-1) * A) * state + write
        previous = t
        yield t, state


def hidden_states(x: ScanInputs) -> Tensor:
    """The state after every token, ``[batch, tokens, channels, n]``, in token order also for a scan in reverse.

    n times as large as the layer's activations: the scan itself never keeps this tensor.
    """
    found = dict(walk_states(x))
    return torch.stack([found[t] for t in range(len(found))], dim=1)
