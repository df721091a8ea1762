"""Packed sequences: from the forms other libraries give them in to one number per token."""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.errors import ConfigError


def seq_idx_from_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[1, tokens] from the cumulative lengths [sequences + 1] of one row, which start at 0 and end at ``tokens``."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ConfigError(f"cu_seqlens has shape {list(cu_seqlens.shape)}, expected [sequences + 1]")
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != tokens or bool((lengths < 0).any()):
        raise ConfigError(f"cu_seqlens={cu_seqlens.tolist()} do not rise from 0 to the {tokens} tokens of the row")
    numbers = torch.arange(len(lengths), device=cu_seqlens.device)
    return numbers.repeat_interleave(lengths.long()).unsqueeze(0)


def seq_idx_from_position_ids(position_ids: Tensor) -> Tensor:
    """[batch, tokens] from positions that restart where a new sequence begins; position_ids: [batch, tokens]."""
    if position_ids.dim() != 2:
        raise ConfigError(f"position_ids has shape {list(position_ids.shape)}, expected [batch, tokens]")
    restarts = (position_ids[:, 1:] != position_ids[:, :-1] + 1).cumsum(1)
    return torch.nn.functional.pad(restarts, (1, 0))


def segment_ids(seq_idx: Tensor) -> Tensor:
    """Packed sequences as the kernels read them: 0, 1, 2, ... along each row, float32 [batch, tokens].

    Two sequences of a row may have the same number as long as another lies between them.
    """
    if seq_idx.dim() != 2:
        raise ConfigError(f"seq_idx has shape {list(seq_idx.shape)}, expected [batch, tokens]")
    changes = (seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1)
    return torch.nn.functional.pad(changes, (1, 0)).float()
