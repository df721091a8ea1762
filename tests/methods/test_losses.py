from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from infssm.methods import Batch, build_method
from infssm.methods.core.losses import cross_entropy
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS


def soft_targets(task: toys.Task, n: int, smoothing: float = 0.1) -> torch.Tensor:
    """Mixed labels of one task with smoothing over all classes."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(task.classes[0], task.classes[-1] + 1, (n,), generator=generator) for _ in range(2))
    one_hot = 0.7 * torch.eye(CLASSES)[first] + 0.3 * torch.eye(CLASSES)[second]
    return (one_hot * (1 - smoothing) + smoothing / CLASSES).double()


@pytest.mark.parametrize("soft", [False, True])
def test_masked_loss_by_hand_and_other_rows_of_the_head_are_free(soft: bool) -> None:
    model, task = toys.vim(), TASKS[1]
    batch = toys.batch(task)
    if soft:
        batch = replace(batch, soft=soft_targets(task, 4))
    method = build_method(model, "seq")
    method.begin_task(task)
    terms = method.loss(batch)
    log_p = torch.log_softmax(model(batch.x)[:, 2:4], dim=1)
    if soft:
        targets = batch.soft[:, 2:4] / (0.9 + 0.1 * 2 / CLASSES)  # the mass of the task's columns
        torch.testing.assert_close(targets.sum(1), torch.ones(4).double())
    else:
        targets = torch.eye(CLASSES).double()[batch.y][:, 2:4]
    torch.testing.assert_close(terms["ce"], -(targets * log_p).sum(1).mean())
    terms["ce"].backward()
    free = [0, 1, 4, 5]
    assert not model.head.weight.grad[free].any()
    assert not model.head.bias.grad[free].any()
    assert model.head.weight.grad[2:4].all()


@pytest.mark.parametrize(("mask", "columns"), [("current", slice(2, 4)), ("seen", slice(0, 4)), ("full", slice(None))])
def test_mask_chooses_the_softmax(mask: str, columns: slice) -> None:
    model = toys.vim()
    method = build_method(model, "seq", mask=mask)
    method.begin_task(TASKS[1])
    batch = toys.batch(TASKS[1])
    expected = cross_entropy(model(batch.x), batch, columns)
    torch.testing.assert_close(method.loss(batch)["ce"], expected)


def test_joint_uses_all_seen_classes() -> None:
    model = toys.vim()
    method = build_method(model, "joint")
    method.begin_task(TASKS[1])
    batch = Batch(toys.batch(TASKS[1]).x, torch.tensor([0, 1, 2, 3]))
    log_p = torch.log_softmax(model(batch.x)[:, :4], dim=1)
    torch.testing.assert_close(method.loss(batch)["ce"], -log_p.diagonal().mean())
