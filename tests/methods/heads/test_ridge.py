"""RanPAC's ridge: chosen by errors on held-out images of all tasks, of which no image is kept."""

from __future__ import annotations

import numpy as np
import torch

from infssm.methods import Batch, Method, attach
from infssm.methods.heads.ranpac import RIDGES, RanPAC
from infssm.models.features import features
from tests.methods import toys

TASKS = [toys.Task(0, (0, 1, 2)), toys.Task(1, (3, 4, 5))]
SIZES, WIDTH = (600, 30), 24


def images(task: toys.Task) -> Batch:
    """A large first task that wants a small ridge, and a small noisy second one that wants a large one."""
    rng = torch.Generator().manual_seed(task.index)
    y = torch.tensor(task.classes).repeat(SIZES[task.index] // 3)
    apart = 1.0 if task.index == 0 else 0.02
    return Batch(torch.randn(len(y), 1, 8, 8, generator=rng, dtype=torch.float64) + apart * y[:, None, None, None], y)


def learned(tasks: list[toys.Task]) -> Method:
    method = attach(toys.vim(), "ranpac", num_classes=toys.CLASSES, width=WIDTH)
    for task in tasks:
        method.begin_task(task)
        method.end_task(task, [images(task)])
    method.module.eval()
    return method


def hidden(method: Method, batch: Batch) -> np.ndarray:
    assert isinstance(method.head, RanPAC)
    with torch.no_grad():
        found = features(method.module, batch.x).float() @ method.head.projection()
    return np.maximum(found.double().numpy(), 0)


def solution(h: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """Ridge regression by an orthogonal factorisation of the rows, not by their Gram matrix."""
    rows = np.vstack([h, np.sqrt(ridge) * np.eye(WIDTH)])
    return np.linalg.lstsq(rows, np.vstack([y, np.zeros((WIDTH, y.shape[1]))]), rcond=None)[0]


def test_errors_on_held_out_images_of_all_tasks_choose_the_ridge() -> None:
    method, batches = learned(TASKS), [images(task) for task in TASKS]
    h = np.vstack([hidden(method, batch) for batch in batches])
    labels = np.concatenate([batch.y.numpy() for batch in batches])
    y = np.eye(toys.CLASSES)[labels]
    held = np.zeros(len(h), dtype=bool)
    for label in range(toys.CLASSES):
        held[np.flatnonzero(labels == label)[4::5]] = True

    def best(rows: np.ndarray) -> float:
        found = [h[rows] @ solution(h[~held], y[~held], ridge) for ridge in RIDGES]
        return RIDGES[int(np.argmin([np.square(one - y[rows]).sum() for one in found]))]

    assert best(held) != best(held & (labels >= 3))  # the last task's images alone would choose another
    expected = solution(h, y, best(held)).T
    found = method.module.get_classifier().weight
    # The fitted module is in the model's precision; Gram matrices square the rows' condition.
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_the_sums_are_part_of_the_state() -> None:
    first, whole = learned(TASKS[:1]), learned(TASKS)
    resumed = attach(toys.vim(), "ranpac", num_classes=toys.CLASSES, width=WIDTH)
    resumed.load_state_dict(first.state_dict())
    resumed.begin_task(TASKS[1])
    resumed.end_task(TASKS[1], [images(TASKS[1])])
    assert torch.equal(resumed.module.get_classifier().weight, whole.module.get_classifier().weight)
