from __future__ import annotations

import math

import pytest
import torch

from infssm.methods.bases.er import masked_cross_entropy
from tests.compare import identical
from tests.methods import toys
from tests.methods.replaying import build, optimizer_of, step, train
from tests.methods.toys import TASKS


def by_hand(logits: torch.Tensor, labels: list[int], columns: list[range]) -> float:
    """Mean of -log softmax over each row's own columns, one scalar at a time."""
    losses = []
    for row, label, allowed in zip(logits.tolist(), labels, columns, strict=True):
        losses.append(math.log(sum(math.exp(row[c]) for c in allowed)) - row[label])
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("mask", "stream", "replayed"),
    [("full", range(6), range(6)), ("seen", range(4), range(4)), ("current+seen", range(2, 4), range(4))],
)
def test_masks_choose_the_columns_of_the_softmax(mask: str, stream: range, replayed: range) -> None:
    logits = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = [2, 3, 0, 3, 1]
    loss = masked_cross_entropy(logits, torch.tensor(labels), current_rows=2, classes=range(2, 4), mask=mask)
    expected = by_hand(logits, labels, [stream] * 2 + [replayed] * 3)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-14)
    loss.backward()
    used = torch.tensor([[c in stream for c in range(6)]] * 2 + [[c in replayed for c in range(6)]] * 3)
    assert identical(logits.grad != 0, used)


@pytest.mark.parametrize("mask", ["full", "seen", "current+seen"])
def test_a_step_is_one_batch_of_stream_and_replay(mask: str) -> None:
    method = build("er", mask=mask)
    train(method, TASKS[0])
    batch = toys.batch(TASKS[1])
    method.begin_task(TASKS[1])
    twin = torch.Generator()
    twin.set_state(method.base.buffer.generator.get_state())
    drawn = torch.randperm(len(method.base.buffer), generator=twin)[:4]
    entries = method.base.buffer.get(drawn)
    logits = method.module(torch.cat((batch.x, entries["image"].double() / 255)))
    labels = torch.cat((batch.y, entries["label"]))
    columns = {"full": [range(6)] * 8, "seen": [range(4)] * 8, "current+seen": [range(2, 4)] * 4 + [range(4)] * 4}
    expected = by_hand(logits, labels.tolist(), columns[mask])
    assert float(method.loss(batch)["ce"].detach()) == pytest.approx(expected, rel=1e-12)


def test_every_image_of_every_step_is_offered_once_the_step_is_done() -> None:
    method = build("er")
    method.begin_task(TASKS[0])
    method.loss(toys.batch(TASKS[0]))
    assert len(method.base.buffer) == 0
    optimizer = optimizer_of(method)
    method.base._pending.clear()
    for seed in range(5):
        step(method, toys.batch(TASKS[0], seed=seed), optimizer)
    assert method.base.buffer.seen == 20
    assert len(method.base.buffer) == 12
    method.end_task(TASKS[0])
    assert method.base.buffer.seen == 20
