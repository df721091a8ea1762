"""MDA: mixtures of one Gaussian per task, against log densities in NumPy and against gda."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch import Tensor

from infssm.methods import Batch, Method, attach
from infssm.methods.heads.mda import MDA
from infssm.models.features import features
from tests.methods import toys

PARTS: list[dict[int, int]] = [{0: 30, 1: 25}, {1: 12, 2: 40}, {0: 15, 1: 20}]
"""By task the number of images of each class: class 3 has none."""


def images(task: int, apart: float = 1.0) -> Batch:
    """Images of a task; those of one class differ between tasks."""
    x, y = [], []
    for label, count in PARTS[task].items():
        rng = torch.Generator().manual_seed(10 * task + label)
        own = torch.randn(count, 1, 8, 8, generator=rng, dtype=torch.float64)
        x.append(own + apart * torch.randn(1, 1, 8, 8, generator=rng, dtype=torch.float64))
        y += [label] * count
    return Batch(torch.cat(x), torch.tensor(y))


def start(name: str = "frozen+mda", **options: float | str) -> Method:
    return attach(toys.vim(), name, num_classes=toys.CLASSES, **options)


def teach(method: Method, batches: list[Batch]) -> MDA:
    for index, batch in enumerate(batches, 0 if method.context.task is None else method.context.task.index + 1):
        method.begin_task(index)
        method.end_task(index, [batch])
    method.module.eval()
    assert isinstance(method.head, MDA)
    return method.head


def seen(method: Method, batch: Batch) -> Tensor:
    with torch.no_grad():
        return features(method.module, batch.x).double()


@pytest.mark.parametrize("prior", ["class", "task"])
def test_scores_are_log_densities_of_mixtures(prior: str) -> None:
    alpha, beta, batches = 0.01, 0.6, [images(task) for task in range(3)]
    method = start(alpha=alpha, beta=beta, prior=prior)
    head = teach(method, batches)
    groups = {
        (task, label): seen(method, batch)[batch.y == label].numpy()
        for task, batch in enumerate(batches)
        for label in PARTS[task]
    }
    covariances = {key: np.cov(x.T, bias=True) for key, x in groups.items()}
    total = sum(len(x) for x in groups.values())
    pooled = sum(len(groups[key]) / total * covariance for key, covariance in covariances.items())
    x = seen(method, images(0)).numpy()
    width = x.shape[1]
    scores, distances = np.full((len(x), toys.CLASSES), -np.inf), np.full((len(x), toys.CLASSES), np.inf)
    for label in range(3):
        own = {task: rows for (task, other), rows in groups.items() if other == label}
        parts = []
        for task, rows in own.items():
            covariance = (1 - beta) * covariances[task, label] + beta * pooled
            covariance = (1 - alpha) * covariance + alpha * np.mean(np.diag(covariance)) * np.eye(width)
            density = multivariate_normal(rows.mean(0), covariance)
            share = len(rows) / sum(map(len, own.values()))
            parts.append(np.log(share) + density.logpdf(x) + width / 2 * np.log(2 * np.pi))
            away = x - rows.mean(0)
            squared = np.einsum("nd,nd->n", away, np.linalg.solve(covariance, away.T).T)
            distances[:, label] = np.minimum(distances[:, label], squared)
        # Classes 0 and 1 came with the first task, class 2 with the second.
        log_prior = -np.log(2) if prior == "task" and label < 2 else 0.0
        scores[:, label] = logsumexp(parts, axis=0) + log_prior
    # The whitening is kept in float32.
    found = head.fitted_module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found[:, :3], scores[:, :3], rtol=1e-5, atol=1e-5 * np.abs(scores[:, :3]).max())
    assert (found[:, 3:] == -np.inf).all()
    np.testing.assert_allclose(head.distances(torch.from_numpy(x)), distances, rtol=1e-5)


def test_it_is_gda_where_every_class_has_one_task() -> None:
    batches = [images(0), Batch(images(1).x[12:], images(1).y[12:])]
    found, expected = (start(name) for name in ("frozen+mda", "frozen+gda"))
    teach(found, batches)
    for index, batch in enumerate(batches):
        expected.begin_task(index)
        expected.end_task(index, [batch])
    expected.module.eval()
    with torch.no_grad():
        torch.testing.assert_close(found.module(images(2).x), expected.module(images(2).x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("drift", ["map", "mean"])
def test_gaussians_of_old_tasks_follow_the_model(drift: str) -> None:
    """Merged over tasks they are the statistics of the classes, which move as those of gda."""
    method = start("seq+mda", drift=drift)
    teach(method, [images(0), images(1)])
    method.begin_task(2)
    with torch.no_grad():
        for parameter in method.module.parameters():
            parameter.mul_(1.05)
    method.end_task(2, [images(2)])
    head = method.head
    assert isinstance(head, MDA)
    assert head.drift_maps, "the model moved, and statistics with it"
    merged = head.tasks[0][0]
    for task in head.tasks[1:]:
        merged = merged.merged(task[0])
    torch.testing.assert_close(merged.mean, head.statistics[0].mean, rtol=1e-9, atol=1e-9)
    assert merged.triangles is not None
    assert head.statistics[0].triangles is not None
    torch.testing.assert_close(merged.triangles, head.statistics[0].triangles, rtol=1e-8, atol=1e-9)


def test_images_left_out_are_removed_from_their_tasks() -> None:
    """Domains far apart: the nearest Gaussian is the image's own."""
    batches = [images(task, apart=20.0) for task in range(3)]
    method = start()
    head = teach(method, batches)
    rows = [torch.arange(0, len(batch.y), 5) for batch in batches]
    out = torch.cat([seen(method, batch)[own] for batch, own in zip(batches, rows, strict=True)])
    labels = torch.cat([batch.y[own] for batch, own in zip(batches, rows, strict=True)])
    left = head.leaving_out(out, labels)
    rest = []
    for batch, own in zip(batches, rows, strict=True):
        stay = torch.ones(len(batch.y), dtype=torch.bool)
        stay[own] = False
        rest.append(Batch(batch.x[stay], batch.y[stay]))
    expected = teach(start(), rest)
    torch.testing.assert_close(left.fitted_module(out), expected.fitted_module(out), rtol=1e-4, atol=1e-3)
    one = head.left_out_distances(out[:1], labels[:1])
    alone = head.leaving_out(out[:1], labels[:1]).distances(out[:1])[:, labels[0]]
    torch.testing.assert_close(one, alone.double(), rtol=0.05, atol=0)


def test_a_gaussian_stays_where_images_of_other_tasks_were_taken_for_its_own() -> None:
    method = start()
    head = teach(method, [images(task) for task in range(3)])
    strangers = 30 * torch.randn(4, head.num_features, dtype=torch.float64, generator=torch.manual_seed(0))
    left = head.leaving_out(strangers, torch.zeros(4, dtype=torch.int64))
    assert isinstance(left, MDA)
    assert [task[0].count.tolist() for task in left.tasks] == [task[0].count.tolist() for task in head.tasks]


def test_a_state_goes_on_as_if_never_stopped() -> None:
    method, other = start("seq+mda"), start("seq+mda")
    teach(method, [images(0), images(1)])
    other.load_state_dict(copy.deepcopy(method.state_dict()))
    other.module.load_state_dict(method.module.state_dict())
    for one in (method, other):
        teach(one, [images(2)])
    with torch.no_grad():
        assert torch.equal(method.module(images(0).x), other.module(images(0).x))


def test_a_forgotten_class_leaves_no_task_behind() -> None:
    method = start()
    head = teach(method, [images(0), Batch(images(1).x[12:], images(1).y[12:])])
    head.forget(2)
    assert len(head.tasks) == 1
    head.refit()
    with torch.no_grad():
        assert (method.module(images(0).x)[:, 2:] == -torch.inf).all()
