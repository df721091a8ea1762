"""Priors of heads that compare likelihoods: over classes, or over the tasks that brought them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from infssm.methods import Batch, Method, attach
from infssm.models.features import features
from tests.methods import toys

TASKS = [toys.Task(0, (0, 1, 2)), toys.Task(1, (3,)), toys.Task(2, (4, 5))]
SIZES = [3, 3, 3, 1, 2, 2]


def images(task: toys.Task) -> Batch:
    rng = torch.Generator().manual_seed(task.index)
    y = torch.tensor(task.classes).repeat(60 // len(task.classes))
    return Batch(torch.randn(len(y), 1, 8, 8, generator=rng, dtype=torch.float64) + 0.1 * y[:, None, None, None], y)


def learned(head: str, tasks: list[toys.Task] = TASKS, **options: str) -> Method:
    method = attach(toys.vim(), head, num_classes=toys.CLASSES, **options)
    for task in tasks:
        method.begin_task(task)
        method.end_task(task, [images(task)])
    method.module.eval()
    return method


def logits(method: Method) -> Tensor:
    with torch.no_grad():
        found: Tensor = method.module(toys.batch(toys.TASKS[0], 8, seed=5).x)
    return found


@pytest.mark.parametrize("head", ["lda", "gda"])
def test_the_prior_of_a_task_is_shared_by_its_classes(head: str) -> None:
    plain, shared = (logits(learned(head, prior=prior)) for prior in ("class", "task"))
    expected = -torch.tensor(SIZES, dtype=torch.float64).log()
    # Heads are kept in float32: a few of its roundings of the largest score.
    torch.testing.assert_close(shared - plain, expected.expand(8, -1), rtol=0, atol=1e-5 * float(plain.abs().max()))


def test_lda_with_the_prior_of_tasks_is_scikit_learns_with_those_priors() -> None:
    """All tasks have 60 images, so the shares of classes among them are the priors, and weigh covariances alike."""
    method, batches = learned("lda", prior="task", drift="none"), [images(task) for task in TASKS]
    with torch.no_grad():
        x = torch.cat([features(method.module, batch.x) for batch in batches]).double()
        found = torch.cat([method.module(batch.x) for batch in batches])
    priors = [1 / (len(TASKS) * size) for size in SIZES]
    other = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-3, priors=priors)
    theirs = other.fit(x.numpy(), torch.cat([batch.y for batch in batches]).numpy()).decision_function(x.numpy())
    expected = theirs + np.log(len(TASKS))
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_classes_that_come_again_stay_with_their_first_task() -> None:
    method = learned("gda", [*TASKS, toys.Task(3, (0,))], prior="task")
    torch.testing.assert_close(method.head.log_prior().neg().exp(), torch.tensor(SIZES, dtype=torch.float64))


def test_a_checkpoint_knows_which_classes_came_together() -> None:
    method = learned("gda", TASKS[:2], prior="task")
    other = attach(toys.vim(), "gda", num_classes=toys.CLASSES, prior="task")
    other.load_state_dict(method.state_dict())
    for one in (method, other):
        one.begin_task(TASKS[2])
        one.end_task(TASKS[2], [images(TASKS[2])])
    assert torch.equal(logits(other), logits(method))
