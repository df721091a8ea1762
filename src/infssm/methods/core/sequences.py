"""Replay of sequences: what a buffer stores of them, and how replayed rows join a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infssm._batch import next_tokens
from infssm.methods.core.contract import Batch, BatchLike


def fields_of(data_kind: str) -> tuple[str, ...]:
    """What a buffer stores of samples of a kind."""
    return ("image", "label") if data_kind == "images" else (_values(data_kind), "length", "label")


def sequence_rows(batch: BatchLike, data_kind: str) -> dict[str, Tensor]:
    """The rows of a batch as a buffer stores them; language has no labels of its own."""
    labels = batch.y if batch.y.ndim == 1 else batch.y.new_zeros(len(batch.y))
    return {_values(data_kind): batch.x, "length": _mask(batch).sum(dim=1), "label": labels}


def joined(batch: BatchLike, stored: Mapping[str, Tensor], data_kind: str) -> Batch:
    """A batch and after it rows of a buffer, ``[b + m, ...]`` padded to the longest, on the batch's device."""
    values, lengths = stored[_values(data_kind)], stored["length"]
    rows = [x[:length].to(batch.x.device) for x, length in zip(values, lengths.tolist(), strict=True)]
    own = [x[:length] for x, length in zip(batch.x, _mask(batch).sum(dim=1).tolist(), strict=True)]
    x = pad_sequence([*own, *rows], batch_first=True)
    ends = torch.tensor([len(row) for row in (*own, *rows)], device=x.device)
    mask = torch.arange(x.shape[1], device=x.device) < ends[:, None]
    if data_kind == "language":
        return Batch(x, next_tokens(x, mask), mask=mask)
    return Batch(x, torch.cat((batch.y, stored["label"].to(batch.y.device))), mask=mask)


def _values(data_kind: str) -> str:
    return "series" if data_kind == "series" else "tokens"


def _mask(batch: BatchLike) -> Tensor:
    mask: Tensor | None = getattr(batch, "mask", None)
    return torch.ones(batch.x.shape[:2], dtype=torch.bool, device=batch.x.device) if mask is None else mask
