"""`efc` against its equation, written out by autograd and by hand in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import Method, build_method
from infssm.methods.regularizers.efc import feature_matrix
from infssm.models.features import features
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS


def by_definition(classifier: nn.Module, rows: Tensor, columns: slice) -> Tensor:
    """``Σ_x E_{c~p}[∇log p_c ∇log p_cᵀ]``: one Jacobian per sample, one outer product per class."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for row in rows:
        jacobian = torch.autograd.functional.jacobian(
            lambda f: classifier(f[None])[0, columns].log_softmax(dim=0), row.detach()
        )
        p = classifier(row[None])[0, columns].softmax(dim=0)
        for c in range(len(p)):
            total += p[c].detach() * torch.outer(jacobian[c], jacobian[c])
    return total


def moved(**options: float) -> tuple[Method, nn.Module, dict[str, Tensor], Tensor]:
    """Method, old model, the method's terms on a batch of the second task, and its images."""
    model = toys.vim()
    method = build_method(model, "efc", **options)
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0], toys.loader(TASKS[0]))
    method.begin_task(TASKS[1])
    old = copy.deepcopy(model)
    toys.nudge(model, 0.05)
    batch = toys.batch(TASKS[1])
    return method, old, method.loss(batch), batch.x


@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_matrix_is_the_mean_outer_product_of_gradients_of_the_log_probabilities(head: str) -> None:
    method = build_method(toys.vim(), f"efc+{head}", num_classes=CLASSES)
    method.begin_task(TASKS[0])
    loader = toys.loader(TASKS[1])
    method.end_task(TASKS[1], loader)
    rows = torch.cat([features(method.module, batch.x) for batch in loader])
    expected = by_definition(method.module.head, rows, slice(0, 4)) / len(rows)  # all classes so far, not the task's
    torch.testing.assert_close(method.regularizers[0].matrix, expected, rtol=1e-10, atol=1e-14)
    if head == "linear":
        weight, p = method.module.head.weight[:4], method.module.head(rows)[:, :4].softmax(dim=1)
        closed = weight.T @ (torch.diag(p.mean(dim=0)) - p.T @ p / len(p)) @ weight
        torch.testing.assert_close(method.regularizers[0].matrix, closed.detach(), rtol=1e-9, atol=1e-13)


def test_penalty_is_the_mean_quadratic_form() -> None:
    method, old, terms, x = moved(weight=7.0, damping=0.3)
    matrix = 7.0 * method.regularizers[0].matrix + 0.3 * torch.eye(16, dtype=torch.float64)
    differences = features(method.module, x) - features(old, x).detach()
    expected = sum(d @ matrix @ d for d in differences) / len(x)
    assert float(expected.detach()) > 0
    torch.testing.assert_close(terms["efc/features"], expected, rtol=1e-9, atol=0)
    parameters = list(method.module.layers.parameters())
    for found, wanted in zip(
        torch.autograd.grad(terms["efc/features"], parameters, retain_graph=True),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


def test_directions_that_the_classifier_does_not_read_move_freely() -> None:
    torch.manual_seed(0)
    classifier = nn.Linear(5, 3).double()
    matrix = feature_matrix(classifier, torch.randn(8, 5, dtype=torch.float64), slice(None))
    # Softmax ignores a shift of all logits, so the matrix has rank 2 at most: 3 directions of 5 are free.
    eigenvalues = torch.linalg.eigvalsh(matrix)
    assert eigenvalues[:3].abs().max() < 1e-12 * eigenvalues[-1]
    assert eigenvalues[3] > 0


def test_only_the_last_task_counts() -> None:
    method = build_method(toys.vim(), "efc")
    for task in TASKS[:2]:
        method.begin_task(task)
        method.end_task(task, toys.loader(task))
    alone = build_method(toys.vim(), "efc")
    alone.begin_task(0)
    alone.end_task(TASKS[1], toys.loader(TASKS[1]))
    torch.testing.assert_close(method.regularizers[0].matrix, alone.regularizers[0].matrix)


def test_a_matrix_that_is_missing_and_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"call method\.end_task\(task, loader\)"):
        build_method(toys.vim(), "efc").begin_task(TASKS[1])
    method = build_method(toys.vim(), "efc")
    method.begin_task(TASKS[0])
    with pytest.raises(ConfigError, match="with a loader of the task's"):
        method.end_task(TASKS[0])
    with pytest.raises(ConfigError, match="gave no sample"):
        method.end_task(TASKS[0], [])
    for option in ("weight", "damping"):
        with pytest.raises(ConfigError, match=option):
            build_method(toys.vim(), "efc", **{option: -1})
