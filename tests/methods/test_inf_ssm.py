from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.methods import build_method
from infssm.ssm import StateSpace, distance
from tests.methods import toys
from tests.methods.test_lwf import mean_square, moved, states
from tests.methods.toys import TASKS


def sn(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(x) - 1


def simplified(old: StateSpace, new: StateSpace) -> Tensor:
    """1 - tr(G3 G3^T) / (tr G1 tr G2) with Gram matrices as truncated time series."""
    a, c, b, d = sn(old.a), sn(old.c), sn(new.a), sn(new.c)
    rows = [torch.stack([p**t * q for t in range(200)], dim=-2) for p, q in ((a, c), (b, d))]
    one, two = rows
    cross = one.mT @ two
    num = (cross @ cross.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    den = one.square().sum((-2, -1)) * two.square().sum((-2, -1))
    return (1 - num / den).mean()


def test_inf_ssm_is_the_papers_distance() -> None:
    old, new, terms, x = moved("inf-ssm", weight=1e3)
    pairs = zip(states(old, x), states(new, x), strict=True)
    expected = 1e3 * torch.stack([simplified(o, n) for o, n in pairs]).mean()
    assert set(terms) == {"ce", "inf-ssm/distance"}
    torch.testing.assert_close(terms["inf-ssm/distance"], expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("b_weight", ["product", "separate"])
def test_inf_ssm_plus_adds_b(b_weight: str) -> None:
    old, new, terms, x = moved("inf-ssm+", weight=1e3, gamma=5.0, b_weight=b_weight)
    before, after = states(old, x), states(new, x)
    factor = 5e3 if b_weight == "product" else 5.0
    expected = factor * mean_square([s.b for s in before], [s.b for s in after])
    torch.testing.assert_close(terms["inf-ssm+/b"], expected, rtol=1e-9, atol=0)
    alone = moved("inf-ssm", weight=1e3)[2]
    torch.testing.assert_close(terms["inf-ssm+/distance"], alone["inf-ssm/distance"])


def at_the_old_model(name: str, **options: Any) -> tuple[Tensor, float]:
    """The penalty there, and the largest entry of its gradient."""
    model = toys.vim()
    method = build_method(model, name, **options)
    method.begin_task(0)
    method.end_task(0)
    method.begin_task(TASKS[1])
    terms = method.loss(toys.batch(TASKS[1]))
    held = terms[f"{name}/distance"]
    gradients = torch.autograd.grad(held, list(model.layers.parameters()), allow_unused=True)
    return held.detach(), max(float(g.abs().max()) for g in gradients if g is not None)


@pytest.mark.parametrize("equality", ["token", "tensor"])
def test_equality_rule_hides_the_distance_of_a_system_to_itself(equality: str) -> None:
    value, pulls = at_the_old_model("inf-ssm", equality=equality)
    assert float(value) == 0.0
    assert not pulls


def test_without_the_rule_the_simplified_distance_pulls_away_from_the_old_model() -> None:
    value, pulls = at_the_old_model("inf-ssm", equality="off")
    assert float(value) > 1.0
    assert pulls


@pytest.mark.parametrize("kind", ["output", "martin", "aligned", "a", "b", "c", "martin+0.1*c"])
def test_exact_is_zero_with_zero_gradient_at_the_old_model(kind: str) -> None:
    value, pull = at_the_old_model("inf-ssm-exact", distance=kind, weight=1e4)
    # Old and new states come from two ways through torch.matmul and may differ by float64's rounding, 1e-15 at most,
    # which the distance squares and its gradient does not.
    assert float(value) < 1e4 * 1e-28
    assert pull < 1e4 * 1e-13


@pytest.mark.parametrize(
    ("given", "factors"),
    [
        ("output", {"output": 1.0}),
        ("martin + 0.1*c", {"martin": 1.0, "c": 0.1}),
        ({"aligned": 2.0, "b": 0.5}, {"aligned": 2.0, "b": 0.5}),
        ("2*fubini-study+3e-1*a", {"fubini-study": 2.0, "a": 0.3}),
    ],
)
def test_exact_is_a_weighted_sum_of_distances(given: Any, factors: dict[str, float]) -> None:
    old, new, terms, x = moved("inf-ssm-exact", distance=given, weight=20.0)
    before, after = states(old, x), states(new, x)
    expected = torch.zeros(())
    for kind, factor in factors.items():
        if kind in ("a", "b", "c"):
            value = mean_square([getattr(s, kind) for s in before], [getattr(s, kind) for s in after])
        else:
            pairs = zip(before, after, strict=True)
            each = [distance(o.map(sn), n.map(sn), kind=kind).mean() for o, n in pairs]
            value = torch.stack(each).mean()
        assert float(value.detach()) > 0
        expected = expected + 20.0 * factor * value
    torch.testing.assert_close(terms["inf-ssm-exact/distance"], expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("bad", ["martim", "0.1*", "x*c", "martin+"])
def test_bad_distances_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"inf-ssm-exact\.distance"):
        build_method(toys.vim(), "inf-ssm-exact", distance=bad)
