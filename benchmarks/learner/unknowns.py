"""Known or unknown, and how sure: half of the classes are taught, and samples of both halves are classified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.learner.data import Samples, by_seed, cifar100, digits, speech
from benchmarks.pages import markdown_table, spread
from infssm import Learner

SPEECH = {"train": {"epochs": 6}}
"""No weights are packaged for sounds: the first lesson trains the backbone."""


def auroc(known: Tensor, unknown: Tensor) -> float:
    """How often an unknown sample scores higher than a known one; ties count one half."""
    truth = np.r_[np.zeros(len(known)), np.ones(len(unknown))]
    return float(roc_auc_score(truth, np.r_[np.asarray(known), np.asarray(unknown)]))


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Mean gap between probability and accuracy over bins of equal width (Guo et al. 2017)."""
    table = np.asarray(probabilities, dtype=np.float64)
    sure, right = table.max(axis=1), table.argmax(axis=1) == np.asarray(labels)
    inside = np.clip(np.ceil(sure * bins).astype(np.int64) - 1, 0, bins - 1)  # a bin includes its upper end
    return float(np.abs(np.bincount(inside, weights=right - sure, minlength=bins)).sum() / len(sure))


class Problem(NamedTuple):
    """Samples to teach and to test, the classes to teach, those not to, and how to make the learner."""

    train: Samples
    test: Samples
    known: list[int]
    unknown: list[int]
    learner: Callable[[], Learner]


def digits_problem(_: Path, seed: int) -> Problem:
    """Five digits of ten, drawn by the seed."""
    order = np.random.default_rng(seed).permutation(10).tolist()
    return Problem(*digits(seed), order[:5], order[5:], lambda: Learner(weights="omniglot", seed=seed))


def speech_problem(root: Path, seed: int) -> Problem:
    """Five spoken digits of ten, drawn by the seed."""
    order = np.random.default_rng(seed).permutation(10).tolist()
    return Problem(*speech(root), order[:5], order[5:], lambda: Learner(seed=seed, settings=SPEECH))


def cifar_problem(root: Path, seed: int, *, trained: bool) -> Problem:
    """The 50 classes that the weights were trained on, or the 50 others; 100 images of each, 20 to test."""
    train, test = cifar100(root)
    order = np.random.RandomState(0).permutation(100).tolist()
    first, second = (order[:50], order[50:]) if trained else (order[50:], order[:50])
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.permutation(np.flatnonzero(train.y == label))[:100] for label in first])
    asked = np.concatenate([np.flatnonzero(test.y == label)[:20] for label in order])
    return Problem(train.at(rows), test.at(asked), first, second, lambda: Learner(weights="cifar100-base", seed=seed))


PROBLEMS: dict[str, Callable[[Path, int], Problem]] = {
    "digits, five of ten": digits_problem,
    "spoken digits, five of ten": speech_problem,
    "CIFAR-100, the 50 classes of the weights": lambda root, seed: cifar_problem(root, seed, trained=True),
    "CIFAR-100, the 50 other classes": lambda root, seed: cifar_problem(root, seed, trained=False),
}


def measure(problem: Problem) -> dict[str, float]:
    learner = problem.learner()
    learner.learn(*problem.train.of(problem.known).given)
    (logits, distances), (other_logits, other_distances) = (
        _scores(learner, problem.test.of(classes)) for classes in (problem.known, problem.unknown)
    )
    calibration = learner._now.calibration
    assert calibration is not None
    known = calibration.unlikeness(logits, distances)
    unknown = calibration.unlikeness(other_logits, other_distances)
    truth = [learner.classes.index(str(label)) for label in problem.test.of(problem.known).y]
    unsure = [1 - part.softmax(1).amax(1) for part in (logits, other_logits)]
    return {
        "auroc": auroc(known, unknown),
        "auroc_softmax": auroc(*unsure),
        "known_called_unknown": float((known > 1).double().mean()),
        "unknown_called_unknown": float((unknown > 1).double().mean()),
        "accuracy": float((logits.argmax(1) == torch.tensor(truth)).double().mean()),
        "ece_before": expected_calibration_error(logits.double().softmax(1), truth),
        "ece_after": expected_calibration_error(calibration.probabilities(logits), truth),
    }


def _scores(learner: Learner, samples: Samples) -> tuple[Tensor, Tensor]:
    """Logits and distances ``[n, K]``."""
    given, found = list(samples.x), []
    for start in range(0, len(given), 64):
        x = learner.classifier.transform(given[start : start + 64])
        found.append(learner._now.scores(learner._now.features(x)))
    logits, distances = zip(*found, strict=True)
    return torch.cat(logits), torch.cat(distances)


def run(data_root: Path, out: Path) -> dict[str, Any]:
    return {n: by_seed(out, n, lambda seed, make=make: measure(make(data_root, seed))) for n, make in PROBLEMS.items()}


def table(found: dict[str, Any]) -> list[str]:
    header = ["taught", "AUROC", "by softmax", "known called unknown", "unknown called unknown", "accuracy"]
    header += ["calibration error before", "after"]
    percent = ("known_called_unknown", "unknown_called_unknown", "accuracy", "ece_before", "ece_after")
    rows = []
    for name, runs_of in found.items():
        runs = list(runs_of.values())
        own, softmax = ([run[key] for run in runs] for key in ("auroc", "auroc_softmax"))
        cells = [f"{np.mean(own):.3f} (least {min(own):.3f})", f"{np.mean(softmax):.3f}"]
        rows.append([name, *cells, *(f"{spread([100 * run[key] for run in runs])} %" for key in percent)])
    return markdown_table(header, rows, numbers=7)
