from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from infssm.methods import Method, attach
from infssm.methods.regularizers.si import SI
from tests.compare import identical
from tests.methods import toys

C, XI = 50.0, 0.9


def build(model: nn.Module, **options: object) -> tuple[Method, SI]:
    method = attach(model, "si", weight=C, xi=XI, **options)
    (si,) = method.regularizers
    assert isinstance(si, SI)
    return method, si


class Quadratic:
    """A loss per parameter entry, h/2 (theta - target)^2, whose path integral is known."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = model
        self.h = {n: 0.5 + torch.rand(p.shape, generator=generator).double() for n, p in model.named_parameters()}
        self.target = {
            n: p.detach() + torch.randn(p.shape, generator=generator).double() for n, p in model.named_parameters()
        }

    def values(self) -> dict[str, Tensor]:
        return {n: self.h[n] / 2 * (p - self.target[n]) ** 2 for n, p in self.model.named_parameters()}

    def train(self, method: Method, steps: int, lr: float) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        x = torch.zeros(1)
        for _ in range(steps):
            loss = sum(v.sum() for v in self.values().values()) + method.penalty(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()


def test_omega_is_the_fall_of_the_loss_along_the_path() -> None:
    model = toys.vim()
    method, si = build(model, params="AC-direct")
    method.begin_task(0)
    loss = Quadratic(model, seed=1)
    start = {k: v.detach() for k, v in si.parameters.take(loss.values()).items()}
    loss.train(method, steps=100, lr=2e-3)
    end = {k: v.detach() for k, v in si.parameters.take(loss.values()).items()}
    for key, omega in si.omega.items():
        torch.testing.assert_close(omega, start[key] - end[key], rtol=5e-3, atol=1e-9)


def test_the_penalty_does_not_enter_the_path_integral() -> None:
    """On the second task the penalty bends the path; omega is still that of the loss, step by step."""
    model = toys.vim()
    method, si = build(model)
    method.begin_task(0)
    Quadratic(model, seed=1).train(method, steps=30, lr=1e-2)
    method.end_task(0)
    method.begin_task(1)
    loss = Quadratic(model, seed=2)
    expected = {key: torch.zeros_like(v) for key, v in si.parameters.clone().items()}
    for _ in range(5):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        gradient = {n: loss.h[n] * (before[n] - loss.target[n]) for n in before}
        loss.train(method, steps=1, lr=1e-2)
        step = {n: gradient[n] * (before[n] - p.detach()) for n, p in model.named_parameters()}
        expected = {k: expected[k] + v for k, v in si.parameters.take(step).items()}
    assert float(method.penalty(torch.zeros(1)).detach()) > 0
    for key, omega in si.omega.items():
        torch.testing.assert_close(omega, expected[key], rtol=1e-9, atol=1e-12)


def test_consolidation_over_two_tasks() -> None:
    model = toys.vim()
    method, si = build(model, clamp_omega=False)
    initial = si.parameters.clone()
    method.begin_task(0)
    assert all(identical(si.anchor[k], v) for k, v in initial.items()), "theta* of task 0 is the initial model"
    expected = {k: torch.zeros_like(v) for k, v in initial.items()}
    anchor = initial
    for task in range(2):
        method.begin_task(task)
        Quadratic(model, seed=task).train(method, steps=5, lr=1e-2)
        omega, values = dict(si.omega), si.parameters.clone()
        method.end_task(task)
        expected = {k: expected[k] + omega[k] / ((values[k] - anchor[k]) ** 2 + XI) for k in expected}
        anchor = values
        for key, value in expected.items():
            torch.testing.assert_close(si.importance[key], value, rtol=1e-9, atol=0)
        assert not any(w.any() for w in si.omega.values())


def test_penalty_has_the_closed_form_and_leaves_other_rows_free() -> None:
    model = toys.vim()
    method, si = build(model, params="AC-direct")
    method.begin_task(0)
    Quadratic(model, seed=1).train(method, steps=5, lr=1e-2)
    method.end_task(0)
    method.begin_task(1)
    assert float(method.penalty(torch.zeros(1)).detach()) == 0.0
    anchor = model.layers[0].mixer.x_proj.weight.detach().clone()
    toys.nudge(model)
    weight = model.layers[0].mixer.x_proj.weight
    model.zero_grad()
    method.penalty(torch.zeros(1)).backward()
    moved = weight.detach() - anchor
    torch.testing.assert_close(
        weight.grad[5:9], 2 * C * si.importance["layers.0.mixer.x_proj.weight[5:9]"] * moved[5:9]
    )
    assert not weight.grad[1:5].any()


def test_negative_importances_are_counted_and_clamped(caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    for clamp in (True, False):
        method, si = build(toys.vim(), clamp_omega=clamp)
        method.begin_task(0)
        si.omega = {key: torch.full_like(w, 1.0) for key, w in si.omega.items()}
        si.omega["layers.0.mixer.A_log"][0, :3] = -2.0
        with caplog.at_level(logging.INFO, logger="infssm.methods.regularizers.si"):
            method.end_task(0)
        found[clamp] = si.importance["layers.0.mixer.A_log"]
        assert si.negative == 3
        assert "3 of" in caplog.text
    assert identical(found[True], found[False].clamp_min(0))
    assert found[False].min() == -2.0 / XI


def test_best_checkpoint_brings_its_own_path_integral() -> None:
    model = toys.vim()
    method, si = build(model)
    method.begin_task(0)
    loss = Quadratic(model, seed=1)
    loss.train(method, steps=3, lr=1e-2)
    best, weights = method.state_dict(), copy.deepcopy(model.state_dict())
    omega = {k: w.clone() for k, w in si.omega.items()}
    loss.train(method, steps=3, lr=1e-2)
    assert not identical(si.omega["layers.0.mixer.A_log"], omega["layers.0.mixer.A_log"])
    model.load_state_dict(weights)
    method.load_state_dict(best)
    for key, value in omega.items():
        assert identical(si.omega[key], value), "a state_dict kept in memory must not follow later steps"
    method.end_task(0)
    torch.testing.assert_close(si.anchor["layers.0.mixer.A_log"], weights["layers.0.mixer.A_log"])


def test_accumulated_gradients_count_once() -> None:
    """Two backwards per step, as with gradient accumulation: the step's gradient is their sum."""
    model = toys.vim()
    method, si = build(model)
    method.begin_task(0)
    loss = Quadratic(model, seed=1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):
        sum(v.sum() for v in loss.values().values()).backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    method.after_step()
    for member in si.parameters.members:
        gradient = 2 * loss.h[member.name] * (before[member.name] - loss.target[member.name])
        expected = member.take(gradient * (before[member.name] - member.parameter.detach()))
        torch.testing.assert_close(si.omega[member.key], expected)


def test_a_task_trained_elsewhere_starts_unregularized() -> None:
    method, si = build(toys.vim())
    method.begin_task(1)
    assert float(method.penalty(torch.zeros(1)).detach()) == 0.0
    assert not any(v.any() for v in si.importance.values())
