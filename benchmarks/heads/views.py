"""Several views of an image: what docs/results/heads.md gains by features that cost no training.

The features so far are the class token of the image. Here the mean over all tokens is set beside it (``tokens``), the
features of the image and of its mirror image are averaged (``mirror``), both when statistics are taken and when images
are classified; and scores of the frozen backbone's Gaussian classes are averaged with those of a model that moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.heads.fit import PRIORS, Gaussian, Kept, Score, log_prior, score, statistics
from benchmarks.heads.runs import SEARCHED, Place, Spec, setup_of
from benchmarks.pages import remembered, remembered_tensors
from infssm.learner.setup import Setup
from infssm.methods.heads.gaussians import Gaussians, gaussian_classifier

ALPHA, BETAS = 1e-3, (0.75, 0.9)


class View(NamedTuple):
    """Which features of an image are taken."""

    tokens: bool
    mirror: bool

    def __str__(self) -> str:
        parts = ["class token and mean token" if self.tokens else "class token", *["mirrored"] * self.mirror]
        return ", ".join(parts)


VIEWS = (View(False, False), View(False, True), View(True, False), View(True, True))


@torch.no_grad()
def _looks(setup: Setup, model: Any, rows: Tensor) -> Tensor:
    """Class token and mean token of images and of their mirror images: [n, 2 (image, mirror), 2 (class, mean), d]."""
    model.eval()
    pixels, found = setup.stream.dataset.images.pixels, []
    for part in rows.split(250):
        images = setup.recipe.eval(pixels[part])
        both = [model.forward_features(side) for side in (images, images.flip(-1))]
        found.append(torch.stack([torch.stack([model.pool(f), f.mean(dim=1)], dim=1) for f in both], dim=1))
    return torch.cat(found)


def looks(spec: Spec, place: Place) -> dict[str, Any]:
    """All views of the images of a run under its models, from its file; kept beside it."""
    return cast(dict[str, Any], remembered_tensors(place.file(spec).with_suffix(".looks"), lambda: _all(spec, place)))


def _all(spec: Spec, place: Place) -> dict[str, Any]:
    run = torch.load(place.file(spec), weights_only=True)
    setup = setup_of(spec, place)
    model, tasks = setup.method.module, list(setup.stream)[: spec.tasks]
    found: dict[str, Any] = {"old": [], "new": [], "labels": run["labels"]}
    for task in tasks:
        rows = torch.from_numpy(task.train.indices)
        still = task.index == 0 or spec.arm == "frozen"
        if not still:
            model.load_state_dict(run["models"][task.index - 1])
            found["old"].append(_looks(setup, model, rows))
        model.load_state_dict(run["models"][task.index])
        found["new"].append(_looks(setup, model, rows))
        if still:
            found["old"].append(found["new"][-1] if task.index else None)
    part = "val" if spec.seed == SEARCHED else "test"
    parts = [getattr(task, part) for task in tasks]
    found[part] = [_looks(setup, model, torch.from_numpy(p.indices)) for p in parts]
    found[f"{part}_labels"] = [p.labels for p in parts]
    return found


def seen(found: dict[str, Any], view: View) -> Kept:
    """The features of a view, as a run keeps them."""

    def features(x: Tensor) -> Tensor:
        x = x.mean(dim=1) if view.mirror else x[:, 0]
        return (x.flatten(1) if view.tokens else x[:, 0]).double()

    part = "val" if "val" in found else "test"
    parts = [(features(x), y) for x, y in zip(found[part], found[f"{part}_labels"], strict=True)]
    old = [None if x is None else features(x) for x in found["old"]]
    return Kept(old, [features(x) for x in found["new"]], found["labels"], {part: parts}, [], 0.0)


def _scores(kept: Kept, settings: set[tuple[float, float]]) -> dict[tuple[float, float], Tensor]:
    """Scores of the validation or test images, by α and β, without a prior, as the head has them: float32 [n, K]."""
    (parts,) = kept.parts.values()
    found, x = statistics(kept), torch.cat([x for x, _ in parts]).float()
    return {each: Gaussians(*gaussian_classifier(found, *each)).float()(x) for each in settings}


def _judged(kept: Kept, scores: Tensor, prior: str) -> Score:
    """The accuracies of scores that were computed already."""
    (part,) = kept.parts
    rows = iter((scores + log_prior(kept, prior)).split([len(y) for _, y in kept.parts[part]]))
    return score(kept, lambda _: next(rows), part)


def _settings(kept: Kept) -> dict[str, Gaussian]:
    """The best on validation images, for either prior."""
    tried = {
        Gaussian(*each, prior): _judged(kept, scores, prior)
        for each, scores in _scores(kept, {(ALPHA, beta) for beta in BETAS}).items()
        for prior in PRIORS
    }
    return {p: max((g for g in tried if g.prior == p), key=lambda g: tried[g].both) for p in PRIORS}


def measure(place: Place, still: Spec, moved: Spec, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Test scores by view, model and prior: the frozen backbone, a moved one, and both together."""

    def fit() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for view, prior, name, value in _measured(place, still, moved, seeds):
            found.setdefault(str(view), {}).setdefault(name, {}).setdefault(prior, []).append(value._asdict())
        return found

    return cast(dict[str, Any], remembered(place.file(moved).with_suffix(".json"), fit, f"views of {seeds}"))


def _measured(place: Place, still: Spec, moved: Spec, seeds: tuple[int, ...]) -> Iterator[tuple[View, str, str, Score]]:
    for view in VIEWS:
        chosen = {spec.arm: _settings(seen(looks(spec, place), view)) for spec in (still, moved)}
        for seed in seeds:
            kept = {s.arm: seen(looks(s._replace(seed=seed, tasks=6), place), view) for s in (still, moved)}
            scores = {arm: _scores(k, {g[:2] for g in chosen[arm].values()}) for arm, k in kept.items()}
            for prior in PRIORS:
                each = {arm: scores[arm][chosen[arm][prior][:2]] for arm in kept}
                each[f"{still.arm} and {moved.arm}"] = torch.stack([*each.values()]).mean(dim=0)
                for name, values in each.items():
                    yield view, prior, name, _judged(kept[still.arm], values, prior)
        print(f"{view}: fitted", flush=True)
