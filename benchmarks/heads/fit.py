"""Every head, fitted to the features that a run kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pages import remembered
from infssm.methods.heads.class_statistics import ClassStatistics, StatisticsSums
from infssm.methods.heads.gaussians import gaussian_classifier
from infssm.methods.heads.gda import lda_classifier
from infssm.methods.heads.ranpac import HELD_OUT, RIDGES, class_positions, ridge_classifier, ridge_errors
from infssm.methods.heads.statistical import MapDrift

ALPHAS, BETAS = (1e-3, 1e-2, 1e-1), (0.5, 0.75, 0.9)
PRIORS = ("class", "task")
"""What is equally likely a priori: all classes, or all tasks."""
Classify = Callable[[Tensor], Tensor]


class Kept(NamedTuple):
    """What a run kept, in float64: per task the features of its images before and after it, and of the parts."""

    old: list[Tensor | None]
    new: list[Tensor]
    labels: list[Tensor]
    parts: dict[str, list[tuple[Tensor, Tensor]]]
    models: list[dict[str, Tensor]]
    seconds_per_step: float

    @property
    def base(self) -> int:
        """Classes of the first task."""
        return int(self.labels[0].max()) + 1

    @property
    def classes(self) -> int:
        return int(self.labels[-1].max()) + 1


def load(path: Path) -> Kept:
    data: dict[str, Any] = torch.load(path, weights_only=True)
    parts = {
        name: [(x.double(), y) for x, y in zip(data[name], data[f"{name}_labels"], strict=True)]
        for name in ("val", "test")
        if name in data
    }
    old = [None if x is None else x.double() for x in data["old"]]
    new = [x.double() for x in data["new"]]
    return Kept(old, new, data["labels"], parts, data["models"], data["seconds_per_step"])


class Score(NamedTuple):
    """In percent: AA (mean over tasks) and accuracy over all classes."""

    aa: float
    all: float

    @property
    def both(self) -> float:
        """What settings are chosen by: either alone can be had by a bias to new, or to base, classes."""
        return (self.aa + self.all) / 2


class Gaussian(NamedTuple):
    """Settings of Gaussian classes."""

    alpha: float
    beta: float
    prior: str


def score(kept: Kept, classify: Classify, part: str) -> Score:
    """After the last task, class-incremental."""
    right = [(classify(x).argmax(1) == y).double() for x, y in kept.parts[part]]
    return Score(100 * float(torch.stack([r.mean() for r in right]).mean()), 100 * float(torch.cat(right).mean()))


def statistics(kept: Kept, *, drift: bool = True, ridge: float = 0.05) -> ClassStatistics:
    """Statistics of all classes after the last task, each taken at the end of its own and moved since."""
    found: ClassStatistics | None = None
    width = kept.new[0].shape[1]
    for old, new, labels in zip(kept.old, kept.new, kept.labels, strict=True):
        sums = StatisticsSums(kept.classes, width, per_class=True)
        sums.add(new, labels)
        if found is not None and old is not None and drift:
            motion = MapDrift(width, ridge=ridge)
            motion.add(old, new)
            found = found.transformed_by(*motion.solve())
        found = sums.statistics() if found is None else found.merged(sums.statistics())
    assert found is not None
    return found


def linear(kept: Kept, *, align: bool = False) -> Classify:
    """The classifier trained with the model; aligned: rows of new classes get the mean norm of the base's (WA)."""
    weight, bias = (kept.models[-1][f"head.{k}"][: kept.classes].double() for k in ("weight", "bias"))
    if align:
        weight, bias, base = weight.clone(), torch.zeros_like(bias), kept.base
        weight[base:] *= weight[:base].norm(dim=1).mean() / weight[base:].norm(dim=1).mean()
    return lambda x: x @ weight.T + bias


def ncm(kept: Kept) -> Classify:
    """Cosine to the class means of normalised features, each as its own task left it."""
    means = torch.zeros(kept.classes, kept.new[0].shape[1], dtype=torch.float64)
    for new, labels in zip(kept.new, kept.labels, strict=True):
        means.index_add_(0, labels, F.normalize(new, dim=1))
    means = F.normalize(means, dim=1)
    return lambda x: F.normalize(x, dim=1) @ means.T


def log_prior(kept: Kept, prior: str) -> Tensor:
    """Of every class: 0, or minus the logarithm of how many classes its task has: [K]."""
    sizes = torch.cat([torch.full_like(y.unique(), len(y.unique())) for y in kept.labels]).double()
    return -sizes.log() if prior == "task" else torch.zeros_like(sizes)


def lda(kept: Kept, found: ClassStatistics, alpha: float, prior: str) -> Classify:
    weight, bias = lda_classifier([found], alpha)
    bias = bias + log_prior(kept, prior)
    return lambda x: x @ weight.T + bias


def gda(kept: Kept, found: ClassStatistics, chosen: Gaussian) -> Classify:
    mean, whiten, offset = gaussian_classifier(found, chosen.alpha, chosen.beta)
    offset = offset + log_prior(kept, chosen.prior)
    return lambda x: Quadratic(x).scores(mean, whiten, offset)


def ranpac(kept: Kept, hidden_width: int | None = None) -> Classify:
    """Random features, as many as the head takes by default; sums over tasks, the ridge as the head finds it."""
    width = kept.new[0].shape[1]
    projection = torch.randn(width, hidden_width or 16 * width, generator=torch.Generator().manual_seed(0))
    sums = [torch.zeros((), dtype=torch.float64)] * 4
    before = torch.zeros(kept.classes, dtype=torch.int64)
    ridges = RIDGES[10:15]  # 100 to 1e6: no others are chosen here
    for new, labels in zip(kept.new, kept.labels, strict=True):
        hidden = F.relu(new.float() @ projection)
        targets = F.one_hot(labels, kept.classes).float()
        held = class_positions(labels, before) % HELD_OUT == HELD_OUT - 1
        before = before + labels.bincount(minlength=kept.classes)
        fresh = [(hidden[m].T @ y[m]).double() for m in (~held, held) for y in (hidden, targets)]
        sums = [one + other for one, other in zip(sums, fresh, strict=True)]
    gram, cross, held_gram, held_cross = sums
    ridge = ridges[int(ridge_errors(gram, cross, held_gram, held_cross, ridges).argmin())]
    weight = ridge_classifier(gram + held_gram, cross + held_cross, ridge)
    assert weight is not None
    return lambda x: F.relu(x @ projection.double()) @ weight.T


class Settings(NamedTuple):
    """Of the fitted heads, chosen on validation images: one of each for either prior."""

    lda: dict[str, float]
    gda: dict[str, Gaussian]


def choose(path: Path, *, drift: bool) -> Settings:
    """The best settings on validation images of a run."""
    lda, gda = remembered(path.with_suffix(".json"), lambda: _best(load(path), drift=drift), f"settings, drift {drift}")
    return Settings(lda, {prior: Gaussian(*values) for prior, values in gda.items()})


def _best(kept: Kept, *, drift: bool) -> Settings:
    found = statistics(kept, drift=drift)
    scores = gaussian_scores(kept, found)
    return Settings(
        {p: max(ALPHAS, key=lambda a, p=p: score(kept, lda(kept, found, a, p), "val").both) for p in PRIORS},
        {p: max((g for g in scores if g.prior == p), key=lambda g: scores[g].both) for p in PRIORS},
    )


def heads(kept: Kept, settings: dict[bool, Settings], *, still: bool) -> Iterator[tuple[str, Classify]]:
    """Every head with its chosen settings; where features stay there is no drift to follow."""
    if not still:
        yield "linear", linear(kept)
        yield "linear, aligned", linear(kept, align=True)
    yield "ncm", ncm(kept)
    for drift in (True,) if still else (True, False):
        found = statistics(kept, drift=drift)
        for prior in PRIORS if drift else PRIORS[:1]:
            name = ("" if drift else ", no drift") + (", task prior" if prior == "task" else "")
            yield f"lda{name}", lda(kept, found, settings[drift].lda[prior], prior)
            yield f"gda{name}", gda(kept, found, settings[drift].gda[prior])
    yield "ranpac", ranpac(kept)


def fitted(path: Path, settings: dict[bool, Settings], *, still: bool) -> dict[str, Score]:
    """Test scores of all heads on a run."""

    def fit() -> dict[str, Score]:
        kept = load(path)
        return {name: score(kept, head, "test") for name, head in heads(kept, settings, still=still)}

    scores = remembered(path.with_suffix(".json"), fit, f"fitted with {settings}")
    return {name: Score(*values) for name, values in scores.items()}


class Quadratic:
    """Scores of many Gaussian heads on the same images, fast: a quadratic form is linear in the products of features.

    Features centred; images ``x: [n, d]`` in, one matrix product per head. A search takes float32.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype = torch.float64) -> None:
        self.middle = x.mean(dim=0)
        self.x = x - self.middle
        self.rows, self.columns = torch.triu_indices(x.shape[1], x.shape[1])
        products = self.x[:, self.rows] * self.x[:, self.columns]
        self.inputs = torch.cat([products, self.x, torch.ones_like(self.x[:, :1])], dim=1).to(dtype)

    def scores(self, mean: Tensor, whiten: Tensor, offset: Tensor) -> Tensor:
        """``offset_c - ½|whiten_c (x - mean_c)|²``: [n, K]."""
        centre = mean - self.middle
        precision = whiten.double().mT @ whiten.double()
        half = torch.where(self.rows == self.columns, 0.5, 1.0) * precision[:, self.rows, self.columns]
        linear = (precision @ centre[..., None])[..., 0]
        constant = offset - 0.5 * (linear * centre).sum(dim=1)
        weight = torch.cat([-half, linear, constant[:, None]], dim=1)
        return self.inputs @ weight.to(self.inputs.dtype).T


def judge(path: Path, *, replay: bool) -> Score:
    """The criterion for settings of an arm: best validation score of a Gaussian, or with replay a linear, head."""

    def best() -> Score:
        kept = load(path)
        linears = (score(kept, linear(kept, align=align), "val") for align in (False, True))
        return max(linears if replay else gaussian_scores(kept).values(), key=lambda found: found.both)

    return Score(*remembered(path.with_suffix(".json"), best, "linear" if replay else "gaussian"))


def gaussian_scores(kept: Kept, found: ClassStatistics | None = None) -> dict[Gaussian, Score]:
    """Validation scores of all settings."""
    found = statistics(kept) if found is None else found
    fast = Quadratic(torch.cat([x for x, _ in kept.parts["val"]]), torch.float32)
    labels = [y for _, y in kept.parts["val"]]
    scores = {}
    for alpha, beta in itertools.product(ALPHAS, BETAS):
        values = fast.scores(*gaussian_classifier(found, alpha, beta))
        for prior in PRIORS:
            hits = ((values + log_prior(kept, prior)).argmax(1) == torch.cat(labels)).double()
            each = [part.mean() for part in hits.split([len(y) for y in labels])]
            score = Score(100 * float(torch.stack(each).mean()), 100 * float(hits.mean()))
            scores[Gaussian(alpha, beta, prior)] = score
    return scores
