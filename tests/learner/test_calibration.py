"""Calibrated probabilities, known or unknown, and shifts of the data, against scikit-learn, SciPy and enumeration."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from infssm.errors import DataError
from infssm.learner.calibration import LIMIT, Calibration, HeldOut, calibrate, held_out_rows, kept_rows, shift
from infssm.methods import Batch, Method, attach
from infssm.models.features import features
from tests.methods import toys


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Mean gap between how sure a classifier is and how often it is right, over 15 bins (Guo et al. 2017)."""
    sure, predicted = (part.numpy() for part in probabilities.max(1))
    accuracy, confidence = calibration_curve(predicted == labels.numpy(), sure, n_bins=15)
    counts = np.histogram(sure, np.linspace(0, 1, 16))[0]
    return float(np.average(np.abs(accuracy - confidence), weights=counts[counts > 0]))


def noisy_logits(m: int, classes: int = 4, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are ``scale`` times too sure: labels are drawn from the softmax of the logits themselves."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(m, classes, generator=rng, dtype=torch.float64)
    labels = logits.softmax(1).multinomial(1, generator=rng)[:, 0]
    return scale * logits, labels


@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_the_temperature_undoes_a_scale_and_makes_probabilities_right(scale: float) -> None:
    logits, labels = noisy_logits(4000, scale=scale)
    found = Calibration.fit(logits, labels, None)
    assert found.temperature == pytest.approx(scale, rel=0.1)

    def loss(log_temperature: float) -> float:
        return log_loss(labels, (logits * math.exp(-log_temperature)).softmax(1).numpy())

    best = optimize.minimize_scalar(loss, bounds=(math.log(scale) - 3, math.log(scale) + 3), method="bounded")
    assert found.temperature == pytest.approx(math.exp(best.x), rel=0.02)  # but for the smoothed targets
    assert calibration_error(found.probabilities(logits), labels) < 0.03


@pytest.mark.parametrize("m", [1, 3, 20])
def test_few_samples_that_are_all_right_do_not_make_it_certain(m: int) -> None:
    logits = 50 * torch.eye(5, dtype=torch.float64)[torch.arange(m) % 5]
    found = Calibration.fit(logits, torch.arange(m) % 5, None)
    sure = found.probabilities(logits).amax(1)
    # The strongest wrong class gets 1 / (m + 2), and so do all the others, which are as likely here.
    assert (sure < 1 - 0.5 / (m + 2)).all()
    assert (sure > 0.2).all()


def test_without_samples_or_with_one_class_probabilities_are_the_softmax() -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    nothing = Calibration.fit(torch.empty(0, 3), nobody, (torch.empty(0), nobody))
    logits = torch.tensor([[1.0, 2.0, -torch.inf]])
    torch.testing.assert_close(nothing.probabilities(logits), logits.double().softmax(1))
    assert nothing.known(logits, torch.tensor([[5.0, 1e9, torch.inf]])).all()
    single = Calibration.fit(torch.tensor([[3.0, -torch.inf]] * 4), torch.zeros(4, dtype=torch.int64), None)
    assert single.probabilities(torch.tensor([[-7.0, -torch.inf]])).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("per_class", [3, 10, 32])
def test_about_the_asked_share_of_new_samples_is_unknown(per_class: int) -> None:
    """Chi-squared distances whose scale differs by class, 20 draws: new samples of each are refused about as often."""
    rng, refused = np.random.default_rng(0), []
    scales, labels = np.geomspace(1, 2, 20), torch.arange(20).repeat(per_class)
    for _ in range(20):
        own = torch.from_numpy(rng.chisquare(8, len(labels)) * scales[labels])
        found = Calibration.fit(torch.zeros(1, 20), labels[:1], (own, labels), unknown=0.05)
        refused.append(stats.chi2(8).sf(found.thresholds.numpy() / scales))
    per_label = np.mean(refused, axis=0)
    assert 0.04 < per_label.mean() < 0.06
    if per_class == 32:  # one threshold for all classes refuses 0.5 % of the first and 14 % of the last
        assert per_label.min() > 0.015
        assert per_label.max() < 0.09


def gaussian_samples(classes: int, n: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Classes of one covariance, of which one in four directions has nearly all the variance."""
    rng = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    y = torch.arange(classes).repeat(n)
    scale = torch.where(torch.arange(width) % 4 == 0, 2.0, 0.1)
    return means[y] + scale * torch.randn(len(y), width, generator=rng), y


class Given(torch.nn.Module):
    """A model whose features are its inputs."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(width, width, bias=False)
        torch.nn.init.eye_(self.body.weight)
        self.head = torch.nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def fitted(name: str, x: Tensor, y: Tensor) -> Method:
    """A fitted head of features as they are."""
    classes = int(y.max()) + 1
    method = attach(Given(x.shape[1], classes), f"frozen+{name}", num_classes=classes)
    method.begin_task(0)
    method.end_task(0, [Batch(x, y)])
    return method


@pytest.mark.parametrize("name", ["gda", "lda", "ncm"])
@pytest.mark.parametrize(("classes", "n"), [(2, 10), (2, 16), (2, 32), (5, 10), (5, 16), (5, 64)])
def test_few_samples_make_no_known_sample_unknown(name: str, classes: int, n: int) -> None:
    """Fewer samples than features up to many more, ten draws of each: about 5 % of fresh samples are refused."""
    refused = []
    for seed in range(10):
        x, y = gaussian_samples(classes, n, 48, seed)
        head, rows = fitted(name, x, y).head, kept_rows(y)
        found = calibrate(head, HeldOut.empty(48).after_task(head, x[rows], y[rows]))
        fresh, _ = gaussian_samples(classes, 40, 48, seed + 100)
        refused.append(~found.known(head.fitted_module(fresh), head.distances(fresh)))
    assert 0.005 < float(torch.cat(refused).double().mean()) < 0.08


@pytest.mark.parametrize(("name", "beta"), [("gda", 0.75), ("lda", 1.0), ("ncm", 1.0)])
@pytest.mark.parametrize("n", [2, 3, 40])
def test_distances_without_a_sample_are_those_of_the_gaussian_without_it(name: str, beta: float, n: int) -> None:
    x, y = gaussian_samples(3, n, 12, seed=0)
    head = fitted(name, x, y).head
    x = head.transformed(x.double())
    found = head.left_out_distances(x, y)
    groups = [x[y == label] for label in range(3)]
    own = [np.cov(group.T, bias=True) for group in groups]
    identity = [0.001 * np.trace((1 - beta) * one + beta * np.mean(own, axis=0)) / 12 for one in own]
    for row, label in enumerate(y.tolist()):
        others = [x[(y == k) & (torch.arange(len(y)) != row)].numpy() for k in range(3)]
        sums = [(group - group.mean(0)).T @ (group - group.mean(0)) for group in others]
        covariance = (1 - beta) * sums[label] / n + beta * sum(sums) / (3 * n)
        gap = x[row].numpy() - others[label].mean(0)
        expected = gap @ np.linalg.solve(0.999 * covariance + identity[label] * np.eye(12), gap)
        assert float(found[row]) == pytest.approx(expected, rel=1e-6)
    if n == 40:  # there a head that is fitted without the sample differs by its divisor alone
        exact = [head.leaving_out(x[i : i + 1], y[i : i + 1]).distances(x[i : i + 1])[0, y[i]] for i in range(len(y))]
        torch.testing.assert_close(found.float(), torch.stack(exact), rtol=0.025, atol=0)


def test_without_another_sample_there_is_no_distance() -> None:
    x, y = gaussian_samples(2, 2, 12, seed=0)
    x, y = x[:3], y[:3]  # two samples of class 0, one of class 1
    assert fitted("gda", x, y).head.left_out_distances(x, y).isinf().tolist() == [False, True, False]


def test_known_compares_the_distance_to_every_class_with_its_threshold() -> None:
    found = Calibration(1.0, torch.tensor([4.0, 100.0], dtype=torch.float64))
    logits, distances = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[5.0, 105.0], [5.0, 5.0]])
    assert found.known(logits, distances).tolist() == [False, True]
    restored = Calibration(**found.state_dict())
    assert restored.temperature == found.temperature
    assert torch.equal(restored.thresholds, found.thresholds)


def test_without_distances_unsure_samples_are_unknown() -> None:
    logits, labels = noisy_logits(400)
    found = Calibration.fit(logits, labels, None, unknown=0.1)
    assert (~found.known(logits, None)).double().mean() == pytest.approx(0.1, abs=0.01)
    assert not found.known(torch.zeros(1, 4), None)
    assert found.known(torch.tensor([[90.0, 0, 0, 0]]), None)


def test_held_out_rows_are_every_fifth_of_each_class_and_never_all_of_one() -> None:
    labels = torch.tensor([0] * 400 + [1] * 11 + [2] * 3 + [3] + [4] * 2)
    rows = held_out_rows(labels)
    assert labels[rows].bincount(minlength=5).tolist() == [LIMIT, 2, 1, 0, 1]
    assert rows[labels[rows] == 1].tolist() == [404, 409]
    assert rows.tolist() == sorted(set(rows.tolist()))


def test_held_out_features_are_limited_and_forget_a_class() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(150, 3, generator=rng), torch.randint(3, (150,), generator=rng)
    held = HeldOut.empty(3)
    for part in torch.arange(150).split(40):
        held = held.add(x[part], y[part])
    assert held.labels.bincount().tolist() == [LIMIT] * 3
    assert {tuple(row) for row in held.features.tolist()} <= {tuple(row) for row in x.tolist()}
    late = {tuple(row) for row in x[120:].tolist()}
    assert any(tuple(row) in late for row in held.features.tolist())
    never = HeldOut.empty(3)
    for part in torch.arange(150).split(40):
        part = part[y[part] != 1]
        never = never.add(x[part], y[part] - (y[part] > 1).long())
    torch.testing.assert_close(held.without(1).state_dict(), never.state_dict(), rtol=0, atol=0)
    again = HeldOut.of(held.state_dict())
    torch.testing.assert_close((again.features, again.labels), (held.features, held.labels), rtol=0, atol=0)


def images(labels: list[int], n: int, seed: int) -> Batch:
    prototypes = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.tensor(labels).repeat(n)
    return Batch(prototypes[y] + 0.3 * torch.randn(len(y), 1, 8, 8, generator=torch.Generator().manual_seed(seed)), y)


def taught(name: str, **options: Any) -> tuple[Method, HeldOut]:
    method = attach(toys.vim(dtype=torch.float32), name, num_classes=6, **options)
    held = HeldOut.empty(16)
    for index, labels in enumerate([[0, 1], [2, 3]]):
        batch = images(labels, 40, seed=index)
        method.begin_task(index)
        if "frozen" not in name:
            toys.nudge(method.module, 0.002, seed=index)
        method.end_task(index, [batch])
        method.module.eval()
        rows = held_out_rows(batch.y)
        with torch.no_grad():
            held = held.after_task(method.head, features(method.module, batch.x[rows]), batch.y[rows])
    return method, held


@pytest.mark.parametrize(
    "name", ["frozen+gda", "frozen+mda", "frozen+lda", "frozen+ncm", "frozen+ranpac", "gda", "ncm"]
)
def test_classes_that_were_not_taught_are_unknown(name: str) -> None:
    """Whole path from images: classes 4 and 5 are never taught; features move in those without a frozen base."""
    method, held = taught(name)
    found = calibrate(method.head, held, unknown=0.05)
    scores = []
    for labels in ([0, 1, 2, 3], [4, 5]):
        with torch.no_grad():
            given = features(method.module, images(labels, 50, seed=9).x)
        logits = method.head.fitted_module(given)
        distances = method.head.distances(given)
        assert torch.equal(found.known(logits, distances), found.unlikeness(logits, distances) <= 1)
        scores.append(found.unlikeness(logits, distances))
    assert roc_auc_score([0] * len(scores[0]) + [1] * len(scores[1]), torch.cat(scores)) > 0.9
    assert (scores[0] <= 1).double().mean() > 0.75


def test_calibration_of_a_trained_head_uses_its_own_logits() -> None:
    method = attach(toys.vim(dtype=torch.float32), "seq", num_classes=6)
    held = HeldOut.empty(16).add(torch.randn(40, 16), torch.arange(40) % 6)
    found = calibrate(method.head, held)
    assert found.thresholds.shape == (1,)
    logits = method.module.head(held.features)
    assert found.temperature == Calibration.fit(logits, held.labels, None).temperature


@pytest.mark.parametrize("name", ["frozen+gda", "frozen+lda", "frozen+ncm"])
def test_calibration_after_forgetting_is_that_without_the_class(name: str) -> None:
    method, held = taught(name)
    method.head.forget(1)
    method.head.refit()
    held = held.without(1)
    assert held.labels.bincount().tolist() == [8, 8, 8]
    found = calibrate(method.head, held)
    assert found.thresholds.isfinite().all()


@pytest.mark.parametrize(("m", "n", "offset"), [(5, 5, 0.0), (7, 3, 0.9), (2, 9, 0.3), (6, 4, 3.0), (1, 1, 0.0)])
def test_the_shift_counts_the_ways_to_divide_the_samples(m: int, n: int, offset: float) -> None:
    rng = np.random.default_rng(m)
    old, new = rng.normal(size=m), rng.normal(size=n) + offset
    values = np.concatenate([old, new])

    def gap(first: tuple[int, ...]) -> float:
        """Largest difference of the distribution functions where ``first`` are the old samples."""
        own = np.isin(np.arange(m + n), first)
        return float(max(abs((values[own] <= v).mean() - (values[~own] <= v).mean()) for v in values))

    found, gaps = shift(torch.from_numpy(old), torch.from_numpy(new)), [gap(c) for c in combinations(range(m + n), m)]
    assert found.statistic == pytest.approx(gap(tuple(range(m))), abs=1e-12)
    assert found.p_value == pytest.approx(np.mean(np.array(gaps) >= found.statistic - 1e-9), rel=1e-6)


def test_the_shift_of_many_samples_is_near_the_limit() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=12_000), rng.normal(size=500) + 0.05
    found = shift(torch.from_numpy(old), torch.from_numpy(new))
    x = found.statistic**2 * 12_000 * 500 / 12_500
    limit = sum(2 * (-1) ** (k - 1) * math.exp(-2 * k**2 * x) for k in range(1, 101))
    assert found.p_value == pytest.approx(limit, abs=0.01)


def test_the_sentence_says_what_the_numbers_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    old = torch.rand(100, 5, generator=rng) + 1
    assert "look like what was taught" in shift(old, torch.rand(50, 5, generator=rng) + 1).sentence
    assert "are unlike what was taught" in shift(old, torch.rand(50, 5, generator=rng) + 2).sentence
    assert "too few to tell" in shift(old[:6], torch.full((1, 5), 99.0)).sentence
    assert "taught already" in shift(old, torch.rand(50, 5, generator=rng)).sentence
    with pytest.raises(DataError, match="nothing to compare"):
        shift(old, torch.empty(0, 5))
