"""`etf` against its definition in float64: the simplex, the loss, and what training does to features."""

from __future__ import annotations

import math

import pytest
import torch

from infssm.errors import ConfigError
from infssm.methods import Batch, attach, build_method
from infssm.methods.heads.slca import ETFClassifier, dot_regression, simplex
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS


@pytest.mark.parametrize("count", [2, 5, 100])
def test_class_directions_have_unit_length_and_equal_angles(count: int) -> None:
    vectors = simplex(count)
    expected = torch.full((count, count), -1 / (count - 1), dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(vectors @ vectors.T, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(vectors.sum(dim=0), torch.zeros(count, dtype=torch.float64), rtol=0, atol=1e-12)


def test_dot_regression_by_hand_and_its_gradient() -> None:
    outputs = torch.tensor([[3.0, 4.0], [0.0, -2.0]], dtype=torch.float64, requires_grad=True)
    directions = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    expected = 10 * 0.5 * ((3 / 5 - 1) ** 2 + (-0.8 - 1) ** 2) / 2
    assert math.isclose(float(dot_regression(outputs, directions).detach()), expected, rel_tol=1e-12)
    assert torch.autograd.gradcheck(lambda o: dot_regression(o, directions), outputs)


def test_scores_are_cosines_and_classes_without_images_never_win() -> None:
    torch.manual_seed(0)
    neck, shift = torch.randn(3, 4).double(), torch.randn(3).double()
    directions = simplex(3)
    directions[2] = 0
    x = torch.randn(5, 4).double()
    n = x @ neck.T + shift
    expected = (n / n.norm(dim=1, keepdim=True)) @ directions.T
    found = ETFClassifier(neck, shift, directions)(x)
    torch.testing.assert_close(found[:, :2], expected[:, :2], rtol=1e-12, atol=1e-12)
    assert (found[:, 2] == -torch.inf).all()


def test_training_turns_class_means_towards_their_directions() -> None:
    cosines = []
    for steps in (1, 400):
        method = attach(toys.vim(), "etf", num_classes=CLASSES, steps=steps)
        for task in TASKS[:2]:
            method.begin_task(task)
            rows = toys.batch(task, 12)
            for image, label in zip(rows.x, rows.y.tolist(), strict=True):
                image[:, 2 * label : 2 * label + 2] += 3  # of every class another stripe is bright
            method.end_task(task, [Batch(rows.x, rows.y)])
        module = method.head.fitted_module
        scores = module(method.head.statistics[0].mean[:4])
        cosines.append(scores[:, :4].diagonal().mean())
        assert scores[:, :4].argmax(dim=1).tolist() == [0, 1, 2, 3]
    assert cosines[1] > cosines[0]


def test_the_number_of_classes_must_be_known_and_options_are_checked() -> None:
    for options in ({"steps": 0}, {"lr": 0.0}, {"shrinkage": 2.0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            build_method(toys.vim(), "etf", num_classes=CLASSES, **options)
    assert "fixed beforehand" in str(type(build_method(toys.vim(), "etf", num_classes=CLASSES).head).why_needs_total)
