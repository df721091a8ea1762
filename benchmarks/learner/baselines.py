"""New classes one lesson after the other: the learner, plain fine-tuning on the new classes, training on everything.

Every arm starts from the same weights. The baselines are plain PyTorch: a linear classifier on all classes, AdamW with
a cosine, no augmentation.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.learner.data import Samples, by_seed, cifar100, digits
from benchmarks.pages import markdown_table, spread
from infssm import Learner
from infssm.models import create_model
from infssm.models.features import features
from infssm.models.pretrained import PACKAGED_FOR

ARMS = {
    "learner, `frozen+gda`": "gda",
    "learner, `frozen+lda`": "lda",
    "fine-tuning on the new classes": "finetune",
    "training the classifier alone on the new classes": "probe",
    "training on everything again": "retrain",
    "training the classifier alone on everything": "reprobe",
}
OLD_IMAGES = {"retrain", "reprobe"}
EPOCHS = {"finetune": 10, "probe": 20, "retrain": 10, "reprobe": 20}
RATES = {"finetune": 1e-3, "probe": 1e-2, "retrain": 1e-3, "reprobe": 1e-2}


class Stream(NamedTuple):
    """Lessons of a few classes each, from packaged weights."""

    weights: str
    train: Samples
    test: Samples
    lessons: list[list[int]]


def digits_stream(_: Path, seed: int) -> Stream:
    """Ten digits, two in a lesson, in an order drawn by the seed."""
    order = np.random.default_rng(seed).permutation(10).reshape(5, 2).tolist()
    return Stream("omniglot", *digits(seed), order)


def cifar_stream(root: Path, seed: int) -> Stream:
    """Ten classes of CIFAR-100 that the weights never saw, two in a lesson, 40 images of each to teach."""
    train, test = cifar100(root)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(np.random.RandomState(0).permutation(100)[50:])[:10]
    rows = np.concatenate([rng.permutation(np.flatnonzero(train.y == label))[:40] for label in chosen])
    return Stream("cifar100-base", train.at(rows), test.of(chosen), chosen.reshape(5, 2).tolist())


STREAMS = {"digits": digits_stream, "CIFAR-100": cifar_stream}


def measure(stream: Stream, arm: str, seed: int) -> dict[str, float]:
    """Accuracy over all classes after the last lesson, and processor seconds per new class."""
    if arm in ("gda", "lda"):
        learner = Learner(weights=stream.weights, method=f"frozen+{arm}", seed=seed)
        given = [stream.train.of(lesson).given for lesson in stream.lessons]
        start = time.process_time()
        for one in given:
            learner.learn(*one)
        seconds = time.process_time() - start
        accuracy = learner.evaluate(*stream.test.given).accuracy
    else:
        accuracy, seconds = _trained(stream, arm, seed)
    classes = sum(map(len, stream.lessons))
    return {"accuracy": accuracy, "seconds": seconds / classes}


def _trained(stream: Stream, arm: str, seed: int) -> tuple[float, float]:
    """A model with an output for every class, trained lesson by lesson."""
    torch.manual_seed(seed)
    reader = Learner(weights=stream.weights)  # how images become model input
    reader.learn(stream.train.x[:4], ["a", "a", "b", "b"])
    x, test = (reader.classifier.transform(list(part.x)) for part in (stream.train, stream.test))
    assert isinstance(x, Tensor)
    assert isinstance(test, Tensor)
    order = [label for lesson in stream.lessons for label in lesson]
    y, truth = (torch.tensor([order.index(label) for label in part.y]) for part in (stream.train, stream.test))
    own, (channels, size) = PACKAGED_FOR[stream.weights]
    model: nn.Module = create_model(
        own["name"], num_classes=len(order), weights=stream.weights, in_chans=channels, img_size=size, **own["options"]
    )
    start, seen = time.process_time(), 0
    for lesson in stream.lessons:
        before, seen = seen, seen + len(lesson)
        _fit(model, x, y, arm, 0 if arm in OLD_IMAGES else before, seen)
    seconds = time.process_time() - start
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(1) for part in test.split(200)])
    return float((predicted == truth).double().mean()), seconds


def _fit(model: nn.Module, x: Tensor, y: Tensor, arm: str, first: int, stop: int) -> None:
    """Train on the classes from ``first`` to ``stop``; outputs of later classes are masked."""
    rows = ((y >= first) & (y < stop)).nonzero().flatten()
    classifier: nn.Module = model.get_classifier()  # type: ignore[operator]
    alone = arm in ("probe", "reprobe")
    parameters = list(classifier.parameters() if alone else model.parameters())
    steps = EPOCHS[arm] * -(-len(rows) // 32)
    optimizer = torch.optim.AdamW(parameters, lr=RATES[arm], weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    with torch.no_grad():
        kept = torch.cat([features(model, part) for part in x[rows].split(200)]) if alone else None
    for _ in range(EPOCHS[arm]):
        for part in torch.randperm(len(rows)).split(32):
            logits = model(x[rows[part]]) if kept is None else classifier(kept[part])
            loss = F.cross_entropy(logits[:, :stop], y[rows[part]])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()


def run(data_root: Path, out: Path) -> dict[str, Any]:
    def measured(name: str, arm: str) -> dict[str, Any]:
        return by_seed(out, f"{name} {arm}", lambda seed: measure(STREAMS[name](data_root, seed), arm, seed))

    return {name: {label: measured(name, arm) for label, arm in ARMS.items()} for name in STREAMS}


def table(found: dict[str, Any]) -> list[str]:
    header = ["", "old images"]
    for name in found:
        header += [f"{name}: accuracy", "seconds per class"]
    rows = []
    for label, arm in ARMS.items():
        cells = []
        for stream in found.values():
            runs = stream[label].values()
            cells.append(f"{spread([100 * run['accuracy'] for run in runs])} %")
            cells.append(f"{np.mean([run['seconds'] for run in runs]):.2f}")
        rows.append([label, "all" if arm in OLD_IMAGES else "none", *cells])
    return markdown_table(header, rows, numbers=len(header) - 2)
