"""The one training step."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from infssm.methods import total_loss, train_step


def test_steps_down_the_sum_of_the_terms() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    terms = train_step(lambda: {"a": weight.square().sum(), "b": 3 * weight.sum()}, optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([1.0 - 0.1 * 5, -2.0 - 0.1 * (-1)]))
    assert {name: float(value.detach()) for name, value in terms.items()} == {"a": 5.0, "b": -3.0}
    assert weight.grad is None


def test_small_terms_survive_a_low_precision() -> None:
    terms = {"a": torch.tensor(256.0, dtype=torch.bfloat16), "b": torch.tensor(0.25, dtype=torch.bfloat16)}
    assert total_loss(terms).item() == 256.25


def test_order_of_the_parts() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    order: list[str] = []

    @contextmanager
    def precision():
        order.append("precision")
        yield

    def before(total: Tensor, terms: dict[str, Tensor]) -> None:
        assert weight.grad is not None
        assert total.item() == terms["a"].item() == 2.0
        weight.grad.mul_(0.5)
        order.append("before")

    def after() -> None:
        assert weight.grad is not None
        assert weight.item() == 0.0
        order.append("after")

    def loss() -> dict[str, Tensor]:
        order.append("loss")
        return {"a": 2 * weight.sum()}

    train_step(loss, optimizer, precision=precision, before_update=before, after_update=after)
    assert order == ["precision", "loss", "before", "after"]


def test_a_refused_step_moves_nothing() -> None:
    weight = nn.Parameter(torch.ones(1))

    def refuse(total: Tensor, terms: dict[str, Tensor]) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train_step(lambda: {"a": weight.sum()}, torch.optim.SGD([weight], lr=1.0), before_update=refuse)
    assert weight.item() == 1.0
