from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import ModelPair, build_method
from infssm.ssm import Observation, StateSpace, record_states
from tests.methods import toys
from tests.methods.toys import TASKS


def moved(name: str, **options: object) -> tuple[nn.Module, nn.Module, dict[str, Tensor], Tensor]:
    """Old model, new model, the method's terms on a batch of the second task, and its images."""
    model = toys.vim()
    method = build_method(model, name, **options)
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0])
    method.begin_task(TASKS[1])
    old = copy.deepcopy(model)
    toys.nudge(model, 0.05)
    batch = toys.batch(TASKS[1])
    terms = method.loss(batch)
    return old, model, terms, batch.x


def states(model: nn.Module, x: Tensor) -> list[StateSpace]:
    with record_states(model) as record:
        model(x)
    return record.flat()


def mean_square(old: list[Tensor], new: list[Tensor]) -> Tensor:
    """Mean over layers and directions of the mean squared difference after soft-normalisation."""
    each = [((2 * torch.sigmoid(x) - 1) - (2 * torch.sigmoid(y) - 1)).square().mean() for x, y in zip(old, new)]  # noqa: B905
    return sum(each) / len(each)


@pytest.mark.parametrize("name", ["lwf-ac", "lwf-abc"])
def test_terms_are_mean_squared_differences_of_normalised_states(name: str) -> None:
    options = {"weight": 50.0} | ({"b_weight": 7.0} if name == "lwf-abc" else {})
    old, new, terms, x = moved(name, **options)
    before, after = states(old, x), states(new, x)
    assert len(before) == 4, "two layers, two directions"
    for key, weight in {"a": 50.0, "c": 50.0, "b": 7.0}.items():
        if key == "b" and name == "lwf-ac":
            assert f"{name}/b" not in terms
            continue
        expected = weight * mean_square([getattr(s, key) for s in before], [getattr(s, key) for s in after])
        assert float(expected.detach()) > 0
        torch.testing.assert_close(terms[f"{name}/{key}"], expected, rtol=1e-9, atol=0)


def test_penalty_and_gradient_are_zero_at_the_old_model() -> None:
    model = toys.vim()
    method = build_method(model, "lwf-abc")
    method.begin_task(0)
    method.end_task(0)
    method.begin_task(TASKS[1])
    terms = method.loss(toys.batch(TASKS[1]))
    held = sum(v for k, v in terms.items() if k != "ce")
    # Frozen and trainable weights take different matrix products: states of order 1 agree to some roundings.
    rounding, weight = 64 * torch.finfo(torch.float64).eps, method.regularizers[0].config.weight
    assert float(held.detach()) <= 3 * weight * rounding**2
    gradients = torch.autograd.grad(held, list(model.layers.parameters()), allow_unused=True)
    assert all(g is None or float(g.abs().max()) <= 10 * weight * rounding for g in gradients)


def test_layers_and_bias_of_the_states_follow_their_options() -> None:
    old, new, terms, x = moved("lwf-ac", weight=1.0, layers=1, include_dt_bias=False)
    with record_states(old, layers=1, include_dt_bias=False) as before:
        old(x)
    with record_states(new, layers=1, include_dt_bias=False) as after:
        new(x)
    expected = mean_square([s.a for s in before.flat()], [s.a for s in after.flat()])
    torch.testing.assert_close(terms["lwf-ac/a"], expected, rtol=1e-9, atol=0)
    full, *_ = moved("lwf-ac", weight=1.0)[2].values()
    assert not torch.allclose(full, terms["lwf-ac/a"])


@pytest.mark.parametrize("name", ["lwf-abc", "inf-ssm+"])
def test_a_model_without_b_is_told_what_to_use(name: str) -> None:
    method = build_method(toys.vim(), name)
    space = StateSpace(torch.full((2, 4), 0.5), torch.ones(2, 4))
    with pytest.raises(ConfigError, match=r"use (lwf-ac|inf-ssm)$"):
        method.regularizers[0].penalty(ModelPair(Observation([space]), Observation([space])))
