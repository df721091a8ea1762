"""`generative`: what it generates before a task, the loss on it, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from infssm.errors import ConfigError, DataError
from infssm.methods import Batch, Method, build_method, parse_name
from infssm.methods.bases.generative import Generative
from infssm.models.generative import ClassLikelihood
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS

SIDE = 3


def start(**options: Any) -> Method:
    sizes = {"num_classes": CLASSES, "num_tasks": len(TASKS)}
    model = toys.model("mamba_generative_nano", side=SIDE, levels=4)
    return build_method(model, "generative", **{"samples": 6, **sizes, **options})


def second_task(**options: Any) -> tuple[Method, Generative]:
    """A method in its second task, with a model that has moved."""
    method = start(**options)
    for task in TASKS[:2]:
        method.begin_task(task, toys.loader(task))
        if task.index == 0:
            method.end_task(task)
    toys.nudge(method.module, 0.05, seed=3)
    assert isinstance(method.base, Generative)
    return method, method.base


def log_softmax(scores: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, scores)))
    return [score - total for score in scores]


def test_the_loss_is_the_likelihood_and_the_divergence_on_what_was_generated() -> None:
    method, base = second_task(weight=1.5)
    one = toys.batch(TASKS[1])
    assert base.values is not None
    assert base.labels is not None
    assert base.old is not None
    twin = torch.Generator()
    twin.set_state(base.generator.get_state())
    rows = torch.randperm(len(base.values), generator=twin)[: len(one.y)]
    terms = method.loss(one)

    head = method.module.head
    assert isinstance(head, ClassLikelihood)
    with torch.no_grad():
        logits = method.module(one.x)
        expected = -sum(float(row[y]) for row, y in zip(logits, one.y, strict=True)) / (len(one.y) * SIDE**2)
        new = head.log_probs(base.values[rows], base.labels[rows])
    assert terms["nll"].item() == pytest.approx(expected, rel=1e-10)
    divergence = 0.0
    for old_row, new_row in zip(base.old[rows].double().flatten(0, 1), new.flatten(0, 1), strict=True):
        p, q = log_softmax(old_row.tolist()), new_row.tolist()
        divergence += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    assert divergence > 0
    assert terms["replay"].item() == pytest.approx(1.5 * divergence / (len(rows) * SIDE**2), rel=1e-10)


def test_before_a_task_every_known_class_generates_as_many_and_the_old_predictions_are_its_own() -> None:
    method, base = second_task()
    assert base.labels is not None
    assert base.labels.tolist() == 6 * [0] + 6 * [1]
    method.end_task(TASKS[1])
    assert base.values is base.labels is base.old is None
    assert method.state_dict()["components"]["generative"]["values"] is None
    method.begin_task(TASKS[2], toys.loader(TASKS[2]))
    assert base.labels.tolist() == [label for label in range(4) for _ in range(6)]
    head = method.module.head
    assert isinstance(head, ClassLikelihood)
    assert base.values is not None
    assert base.old is not None
    found = head.log_probs(base.values, base.labels)
    torch.testing.assert_close(base.old.double(), found, rtol=2e-3, atol=1e-6)


def test_domains_rehearse_all_classes() -> None:
    method = start(domains=True)
    task = toys.Task(1, tuple(range(CLASSES)))
    info: Any = type("Domain", (), {"index": 1, "classes": task.classes, "past": CLASSES})
    method.begin_task(info, toys.loader(task))
    assert isinstance(method.base, Generative)
    assert method.base.labels is not None
    assert method.base.labels.unique().tolist() == list(range(CLASSES))


def test_without_weight_nothing_is_generated() -> None:
    method, base = second_task(weight=0)
    assert base.values is None
    assert method.loss(toys.batch(TASKS[1])).keys() == {"nll"}


def test_the_range_is_that_of_the_first_task() -> None:
    method = start()
    bright = Batch(3 + torch.rand(2, 1, SIDE, SIDE, dtype=torch.float64), torch.tensor([0, 1]))
    method.begin_task(TASKS[0], [bright])
    assert float(method.module.low) == float(bright.x.min())
    assert float(method.module.high) == float(bright.x.max())
    method.end_task(TASKS[0])
    method.begin_task(TASKS[1], toys.loader(TASKS[1]))
    assert float(method.module.low) == float(bright.x.min())


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match=r"VisionMamba does not: use model\.name=mamba_generative_nano"):
        build_method(toys.vim(), "generative", num_classes=CLASSES)
    with pytest.raises(ConfigError, match="leave regularizers out"):
        parse_name("generative+ewc")
    with pytest.raises(ConfigError, match="generative trains a classifier of its own; leave cosine out"):
        parse_name("generative+cosine")
    with pytest.raises(ConfigError, match=r"begin_task\(task, loader\)"):
        start().begin_task(TASKS[0])
    black = Batch(torch.zeros(2, 1, SIDE, SIDE, dtype=torch.float64), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="all samples of the first task have the value 0"):
        start().begin_task(TASKS[0], [black])
    with pytest.raises(ConfigError, match="samples"):
        start(samples=0)
    with pytest.raises(ConfigError, match="does not work on tokens"):
        start(data_kind="tokens")


def test_it_goes_on_with_more_classes() -> None:
    model = toys.model("mamba_generative_nano", side=SIDE, levels=4)
    model.reset_classifier(4)
    small = build_method(model.double(), "generative", num_classes=4, num_tasks=2, samples=6)
    for task in TASKS[:2]:
        small.begin_task(task, toys.loader(task))
        small.end_task(task)
    toys.nudge(small.module, 0.05, seed=3)
    grown, fresh = start(), start()
    grown.grow_from(small.state_dict(), small.module.state_dict())
    x = toys.batch(TASKS[0]).x
    assert torch.equal(grown.module(x)[:, :4], small.module(x))
    for name, rows in grown.module.head.named_parameters():
        assert torch.equal(rows[4:], fresh.module.head.get_parameter(name)[4:])
