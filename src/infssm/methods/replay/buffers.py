"""Replay buffers: a fixed number of entries in memory that is allocated once.

:class:`ReservoirBuffer` keeps a uniform sample of a stream, :class:`BalancedBuffer` a quota of every class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from infssm._processes import gather_rows, largest, this_share
from infssm.errors import CheckpointError, ConfigError
from infssm.methods.core.contract import Stateful

FIELDS: Mapping[str, torch.dtype] = {
    "image": torch.uint8,
    "label": torch.int64,
    "task": torch.int64,
    "logits": torch.float32,
    "features": torch.float32,
    "series": torch.float32,
    "tokens": torch.int64,
    "length": torch.int64,
    "target": torch.float32,
}
"""The fields of an entry. ``image: [c, h, w]`` before augmentation, ``logits: [K]``, ``features: [...]``.

Sequences, padded with zeros after their ``length``: ``series: [time, width]``, ``tokens: [time]``."""
_TIMED = ("series", "tokens")
"""Fields whose entries grow with the longest sequence."""


class Buffer(Stateful):
    """Up to ``capacity`` entries of the fields declared in ``stores``, on the CPU.

    Memory for all entries is allocated at the first write, when the shape of one entry is known, and grows only for a
    longer sequence. All random numbers come from the buffer's own generator, seeded by ``seed``: processes that write
    the same rows (see :meth:`gather`) hold the same buffer and draw the same entries.
    """

    saved: ClassVar[tuple[str, ...]] = ("generator",)

    def __init__(self, capacity: int, stores: Sequence[str], *, seed: int = 0) -> None:
        if capacity < 1:
            raise ConfigError(f"a buffer of {capacity} entries holds nothing; give at least 1")
        if unknown := set(stores) - set(FIELDS):
            raise ConfigError(f"unknown buffer field {sorted(unknown)}; known: {', '.join(FIELDS)}")
        if "label" not in stores:
            raise ConfigError("every buffer entry has a label; add 'label' to the stored fields")
        self.capacity = capacity
        self.stores = tuple(stores)
        self.generator = torch.Generator().manual_seed(seed)
        self._data: dict[str, Tensor] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, field: str) -> Tensor:
        """One field of all entries, ``[len, ...]``: a view, writing to it changes the buffer."""
        if field not in self.stores:
            raise ConfigError(f"this buffer stores {', '.join(self.stores)}, not {field!r}")
        if field not in self._data:
            raise ConfigError("the buffer is empty")
        return self._data[field][: self._size]

    @property
    def nbytes(self) -> int:
        """Bytes of the entries (0 before the first write)."""
        return sum(data.numel() * data.element_size() for data in self._data.values())

    def clear(self) -> None:
        """Forget all entries; the memory stays."""
        self._size = 0

    def get(self, indices: Tensor) -> dict[str, Tensor]:
        """Copies of the entries at ``indices: [m]``, each field ``[m, ...]``."""
        return {field: self[field][indices] for field in self.stores}

    def sample(self, count: int) -> Tensor:
        """Indices of ``count`` different entries drawn uniformly (all, shuffled, if there are fewer): ``[m]``."""
        return torch.randperm(self._size, generator=self.generator)[:count]

    def fresh_generator(self, *, per_process: bool = True) -> torch.Generator:
        """A generator seeded from the buffer's, one stream per process (or one for all), such as for augmentation."""
        seed = int(torch.randint(2**62, (), generator=self.generator))
        return torch.Generator().manual_seed(seed + (this_share().number if per_process else 0))

    def gather(self, **rows: Tensor) -> dict[str, Tensor]:
        """Rows of all processes in their order, on the CPU in the buffer's types: what every process should write."""
        if set(rows) != set(self.stores):
            raise ConfigError(f"this buffer stores {', '.join(self.stores)}; got {', '.join(rows)}")
        gathered = {}
        for field, values in rows.items():
            dtype = FIELDS[field]
            if dtype is torch.uint8 and values.dtype is not torch.uint8:
                raise ConfigError(f"buffers store {field} as uint8 before augmentation, got {values.dtype}")
            typed = values.detach().to(dtype)
            if field in _TIMED:
                typed = _padded(typed, largest(typed.shape[1]))
            gathered[field] = gather_rows(typed).cpu()
        return gathered

    def write(self, slots: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Put ``rows`` (each ``[m, ...]``) into ``slots: [m]``, all different and next to the filled part or in it."""
        if not self._data:
            self._data = {f: torch.zeros(self.capacity, *rows[f].shape[1:], dtype=FIELDS[f]) for f in self.stores}
        rows = dict(rows)
        for field in self.stores:
            if field in _TIMED:
                time = max(rows[field].shape[1], self._data[field].shape[1])
                self._data[field], rows[field] = (_padded(t, time) for t in (self._data[field], rows[field]))
            if rows[field].shape[1:] != self._data[field].shape[1:]:
                raise ConfigError(
                    f"buffer entries have {field} of shape {tuple(self._data[field].shape[1:])}, "
                    f"got {tuple(rows[field].shape[1:])}; a buffer holds one shape"
                )
            self._data[field][slots] = rows[field]
        if len(slots):
            self._size = max(self._size, int(slots.max()) + 1)

    def reorder(self, indices: Tensor) -> None:
        """Keep the entries at ``indices: [m]`` in that order, drop the others."""
        for field, data in self._data.items():
            data[: len(indices)] = self[field][indices]
        self._size = len(indices)

    def forget(self, label: int) -> None:
        """Drop the entries of a class; labels above it move down by one."""
        if len(self):
            self.reorder(torch.nonzero(self["label"] != label).flatten())
            self["label"][self["label"] > label] -= 1

    def state_dict(self) -> dict[str, Any]:
        """Entries and generator; a copy that later writes leave alone."""
        return {
            "capacity": self.capacity,
            "data": {field: data[: self._size].clone() for field, data in self._data.items()},
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` into a buffer of the same capacity and fields."""
        data: Mapping[str, Tensor] = state["data"]
        if state["capacity"] != self.capacity or (data and set(data) != set(self.stores)):
            raise CheckpointError(
                f"saved buffer of {state['capacity']} entries with {', '.join(data)}; "
                f"this one has {self.capacity} with {', '.join(self.stores)}: resume with the options of the run"
            )
        self._data, self._size = {}, 0
        if data:
            self.write(torch.arange(len(data["label"])), data)
        super().load_state_dict(state)


class ReservoirBuffer(Buffer):
    """Keeps a uniform sample of a stream.

    A row gets a free slot while there is one; after that row number n (from 0) gets slot r, uniform over 0..n, if the
    buffer has such a slot.
    """

    saved = ("generator", "seen")

    def __init__(self, capacity: int, stores: tuple[str, ...], *, seed: int = 0) -> None:
        super().__init__(capacity, stores, seed=seed)
        self.seen = 0
        """Rows offered so far, over all epochs."""

    def offer(self, **rows: Tensor) -> None:
        """Offer the rows of all processes, each field ``[b, ...]``; they count in order."""
        gathered = self.gather(**rows)
        count = len(gathered["label"])
        number = torch.arange(self.seen, self.seen + count)
        self.seen += count
        # 62 random bits modulo n + 1: the bias is below 1e-12 for any stream.
        drawn = torch.randint(2**62, (count,), generator=self.generator) % (number + 1)
        free = torch.arange(len(self), len(self) + count)
        slots = torch.where(free < self.capacity, free, drawn)
        # Of several rows that drew one slot the last stays, as if they had come one by one.
        last = {slot: row for row, slot in enumerate(slots.tolist()) if slot < self.capacity}
        chosen = torch.tensor(list(last.values()), dtype=torch.int64)
        self.write(torch.tensor(list(last), dtype=torch.int64), {f: v[chosen] for f, v in gathered.items()})

    def clear(self) -> None:
        """Forget all entries and restart the count."""
        super().clear()
        self.seen = 0


class BalancedBuffer(Buffer):
    """Entries of a class stay in the order they were added, the most valuable first; trimming keeps the first."""

    def quota(self, num_classes: int) -> int:
        """Entries per class when ``num_classes`` share the buffer."""
        return self.capacity // num_classes

    def trim(self, quota: int) -> None:
        """Keep the first ``quota`` entries of every class; classes come out in ascending order."""
        if len(self) == 0:
            return
        labels = self["label"]
        kept = [torch.nonzero(labels == label).flatten()[:quota] for label in torch.unique(labels)]
        self.reorder(torch.cat(kept))

    def append(self, **rows: Tensor) -> None:
        """Add rows that every process holds already, each field ``[b, ...]``."""
        count = len(rows["label"])
        if len(self) + count > self.capacity:
            raise ConfigError(f"{count} entries do not fit: {len(self)} of {self.capacity} are in use; trim first")
        self.write(torch.arange(len(self), len(self) + count), rows)


def _padded(values: Tensor, time: int) -> Tensor:
    """``values: [b, shorter, ...]`` with zeros after their end: ``[b, time, ...]``."""
    if values.shape[1] == time:
        return values
    padded = values.new_zeros(len(values), time, *values.shape[2:])
    padded[:, : values.shape[1]] = values
    return padded
