from __future__ import annotations

import torch
from torch import Tensor, nn

from infssm.methods import Batch, build_method
from infssm.methods.regularizers.ewc import MAS
from tests.methods import toys
from tests.methods.toys import TASKS

WEIGHT = 12.0


def sensitivity_by_hand(model: nn.Module, batches: list[Batch], seen: int) -> dict[str, Tensor]:
    """(1/N) sum over batches of |d sum_x ||f(x)||^2 / d theta|."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches:
        model.zero_grad()
        sum(sum(float(1) * f**2 for f in row[:seen]) for row in model(batch.x)).backward()
        for name, parameter in model.named_parameters():
            sums[name] += 0 if parameter.grad is None else parameter.grad.abs()
    model.zero_grad()
    return {name: s / sum(len(b.y) for b in batches) for name, s in sums.items()}


def test_importance_is_the_sensitivity_of_the_seen_logits_summed_over_tasks() -> None:
    model = toys.vim()
    method = build_method(model, "mas", weight=WEIGHT, params="ABC-full")
    (mas,) = method.regularizers
    assert isinstance(mas, MAS)
    expected: dict[str, Tensor] = {}
    for task in TASKS[:2]:
        method.begin_task(task)
        toys.nudge(model, seed=task.index)
        new = mas.parameters.take(sensitivity_by_hand(model, toys.loader(task), task.classes[-1] + 1))
        expected = {k: expected.get(k, 0) + v for k, v in new.items()}
        method.end_task(task, toys.loader(task))
        for key, value in expected.items():
            torch.testing.assert_close(mas.importance[key], value, rtol=1e-10, atol=1e-18)
    assert len({float(v.max()) for v in expected.values()}) > 1


def test_penalty_has_the_closed_form() -> None:
    model = toys.vim()
    method = build_method(model, "mas", weight=WEIGHT)
    (mas,) = method.regularizers
    method.end_task(TASKS[0], toys.loader(TASKS[0]))
    method.begin_task(TASKS[1])
    assert float(mas.penalty(None)["penalty"].detach()) == 0.0
    anchor = model.layers[1].mixer.A_log.detach().clone()
    toys.nudge(model)
    mas.penalty(None)["penalty"].backward()
    a_log = model.layers[1].mixer.A_log
    torch.testing.assert_close(
        a_log.grad, 2 * WEIGHT * mas.importance["layers.1.mixer.A_log"] * (a_log.detach() - anchor)
    )
