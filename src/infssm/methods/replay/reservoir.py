"""Reservoir sampling: every row ever offered is in the buffer with the same probability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from infssm.methods.replay.buffer import Buffer


class ReservoirBuffer(Buffer):
    """Keeps a uniform sample of a stream.

    A row takes a free slot while there is one; after that row number n (from 0) takes slot r, uniform over 0..n, if
    the buffer has such a slot.
    """

    def __init__(self, capacity: int, stores: tuple[str, ...], *, seed: int = 0) -> None:
        super().__init__(capacity, stores, seed=seed)
        self.seen = 0
        """Rows offered so far, over all epochs."""

    def offer(self, **rows: Tensor) -> None:
        """Offer the rows of all processes, each field ``[b, ...]``; they count in order."""
        gathered = self.gather(**rows)
        slots = self._draw_slots(len(gathered["label"]))
        # Of several rows that drew one slot the last stays, as if they had come one by one.
        last = {slot: row for row, slot in enumerate(slots.tolist()) if slot < self.capacity}
        chosen = torch.tensor(list(last.values()), dtype=torch.int64)
        self.write(torch.tensor(list(last), dtype=torch.int64), {f: v[chosen] for f, v in gathered.items()})

    def _draw_slots(self, count: int) -> Tensor:
        number = torch.arange(self.seen, self.seen + count)
        self.seen += count
        # 62 random bits modulo n + 1: the bias is below 1e-12 for any stream.
        drawn = torch.randint(2**62, (count,), generator=self.generator) % (number + 1)
        free = torch.arange(len(self), len(self) + count)
        return torch.where(free < self.capacity, free, drawn)

    def clear(self) -> None:
        """Forget all entries and start counting anew."""
        super().clear()
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        """Entries, generator and counter."""
        return super().state_dict() | {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        super().load_state_dict(state)
        self.seen = state["seen"]
