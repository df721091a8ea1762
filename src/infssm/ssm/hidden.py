"""Hidden states of selective layers, token by token, for analysis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.ops import ScanInputs


def hidden_states(x: ScanInputs) -> Tensor:
    """The state after every token, ``[batch, tokens, channels, n]``, in token order also for a scan in reverse.

    Plain PyTorch, and n times as large as the layer's activations: the scan itself never keeps this tensor.
    """
    delta = x.delta if x.delta_bias is None else x.delta + x.delta_bias
    delta = F.softplus(delta) if x.delta_softplus else delta
    B = x.B if x.B.ndim == 3 else x.B.repeat_interleave(x.u.shape[-1] // x.B.shape[2], dim=2)
    B = B.unsqueeze(2) if x.B.ndim == 3 else B
    decay = torch.exp(delta.unsqueeze(-1) * x.A)
    write = (delta * x.u).unsqueeze(-1) * B
    state = torch.zeros_like(write[:, 0]) if x.initial_state is None else x.initial_state
    tokens = range(x.u.shape[1])
    found = [state] * len(tokens)
    previous = None
    for t in reversed(tokens) if x.reverse else tokens:
        if x.seq_idx is not None and previous is not None:  # packed sequences begin with an empty state
            state = state * (x.seq_idx[:, t] == x.seq_idx[:, previous])[:, None, None]
        state = decay[:, t] * state + write[:, t]
        found[t], previous = state, t
    return torch.stack(found, dim=1)
