"""State by attribute name: what is saved, that it is a copy, and that it is put back."""

from __future__ import annotations

import torch
from torch import Tensor

from infssm.methods.core.contract import Stateful
from infssm.methods.replay.buffers import ReservoirBuffer


class Counter(Stateful):
    saved = ("count", "sums", "best", "generator", "buffer")

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, Tensor] = {"a": torch.zeros(2)}
        self.best: Tensor | None = None
        self.generator = torch.Generator().manual_seed(0)
        self.buffer = ReservoirBuffer(4, ("label",))
        self.scratch = 0
        """Not saved."""

    def step(self) -> Tensor:
        self.count += 1
        self.scratch += 1
        drawn = torch.rand(2, generator=self.generator)
        self.sums["a"] += drawn  # in place: a state that shared the tensor would change with it
        self.best = drawn
        self.buffer.offer(label=torch.tensor([self.count]))
        return drawn


def test_a_restored_object_goes_on_as_the_saved_one_would() -> None:
    one = Counter()
    for _ in range(3):
        one.step()
    state = one.state_dict()
    assert set(state) == set(Counter.saved)
    expected = [one.step() for _ in range(5)]

    other = Counter()
    other.load_state_dict(state)
    assert (other.count, other.scratch, len(other.buffer)) == (3, 0, 3)
    for want in expected:
        torch.testing.assert_close(other.step(), want, rtol=0, atol=0)
    torch.testing.assert_close(other.sums["a"], one.sums["a"], rtol=0, atol=0)
    torch.testing.assert_close(other.buffer["label"], one.buffer["label"], rtol=0, atol=0)
    assert other.buffer.seen == 8


def test_neither_side_changes_a_state() -> None:
    one, other = Counter(), Counter()
    one.step()
    state = one.state_dict()
    kept = state["sums"]["a"].clone()
    other.load_state_dict(state)
    one.step()
    other.step()
    torch.testing.assert_close(state["sums"]["a"], kept, rtol=0, atol=0)


def test_what_was_not_there_yet_is_not_there_again() -> None:
    state = Counter().state_dict()
    other = Counter()
    other.step()
    other.load_state_dict(state)
    assert other.best is None
    assert len(other.buffer) == 0
