"""The searched table of docs/results/cold-start.md: an arm is trained once per setting, all heads are fitted to it.

All arms of a stream and seed start from one task-0 model. Rate and weight are chosen on validation images of seed 0
after its first tasks, the heads' shrinkage on those after all of them; the other seeds are only tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.heads.fit import Kept, gaussian_scores, lda, ncm, ranpac, score, statistics
from benchmarks.heads.runs import SEARCHED, train_epochs
from benchmarks.pages import remembered
from infssm._seeding import seed_all
from infssm.bench.experiment import Experiment
from infssm.learner.config.load import load_config, merge
from infssm.learner.setup import Setup, build
from infssm.methods.core.views import FittedConfig, Views
from infssm.methods.heads.gaussians import Gaussians, gaussian_classifier

FROZEN = "frozen"
GRID: dict[str, tuple[dict[str, Any], tuple[tuple[float, float | None], ...]]] = {
    "plain": ({"name": "seq"}, ((1e-4, None), (3e-4, None), (1e-3, None))),
    "lwf": ({"name": "lwf"}, ((1e-3, 1.0), (1e-3, 10.0), (3e-4, 1.0))),
    "lwf-f": ({"name": "lwf-f"}, ((1e-3, 1.0), (1e-3, 10.0), (3e-4, 1.0))),
    "efc": ({"name": "efc"}, ((1e-3, 1.0), (1e-3, 10.0), (3e-4, 1.0))),
    "lwf-ac": ({"name": "lwf-ac"}, ((1e-3, 1e2), (1e-3, 1e4), (3e-4, 1e2))),
    "output": ({"name": "inf-ssm-exact"}, ((1e-3, 15.0), (1e-3, 150.0), (3e-4, 15.0))),
}
"""Of every arm its method, and the learning rates and weights that are tried: three of each."""
EPOCHS = 3
"""Of a later task."""
SEARCHED_TASKS = 2
ALPHAS = (1e-3, 1e-2, 1e-1)
RANDOM_FEATURES = 1024
LAST = Views(FittedConfig(mean_token=True, mirror=True))
EARLY = Views(FittedConfig(mean_token=True, token_spread=True, blocks=(1,), mirror=True))
"""Views by which every arm is judged: of the last block, and of the first, as in the presets."""
WIDTH = 192
"""Of the first of these; those of the other come behind it."""


class Setting(NamedTuple):
    """What is trained: an arm with a rate and a weight."""

    arm: str
    rate: float = 1e-3
    weight: float | None = None

    @property
    def label(self) -> str:
        """Its name in files."""
        return f"{self.arm}-lr{self.rate:g}" + ("" if self.weight is None else f"-w{self.weight:g}")


class Stream(NamedTuple):
    """A stream with a seed: the settings that all of its arms share, and where results are kept."""

    name: str
    seed: int
    values: Mapping[str, Any]
    out: Path

    def file(self, setting: Setting, tasks: int | None = None) -> Path:
        """Where the features of an arm are kept, trained on all tasks or on the first ones."""
        return self.out / self.name / f"{self.seed}-{setting.label}-{tasks or 'all'}.pt"

    def setup(self, setting: Setting) -> Setup:
        """Stream, recipe, model and method as ``infssm run`` would build them after task 0."""
        shared = load_config(self.values)
        first = Experiment.of(shared).task0_weights
        options = {} if setting.arm == FROZEN else GRID[setting.arm][0]
        weight = {} if setting.weight is None else {"weight": setting.weight}
        changes = {"method": {"name": "seq", **options, **weight}, "train": {"lr": setting.rate}}
        config = load_config(merge({key: value for key, value in self.values.items() if key != "method"}, changes))
        return build(config, torch.device("cpu"), task0=first)


@torch.no_grad()
def features(setup: Setup, rows: Any) -> Tensor:
    """Both views of images, without augmentation, side by side: float64 ``[n, d]``."""
    model, recipe, pixels = setup.method.module.eval(), setup.recipe, setup.stream.dataset.images.pixels
    inputs = (recipe.eval(pixels[part]) for part in torch.from_numpy(rows).split(250))
    return torch.cat([torch.cat([LAST(model, x), EARLY(model, x)], dim=1) for x in inputs]).double()


def view(kept: Kept, *, early: bool) -> Kept:
    """One of the two views alone."""
    columns = slice(WIDTH, None) if early else slice(WIDTH)
    parts = {name: [(x[:, columns], y) for x, y in rows] for name, rows in kept.parts.items()}
    old = [None if x is None else x[:, columns] for x in kept.old]
    return kept._replace(old=old, new=[x[:, columns] for x in kept.new], parts=parts)


def train(stream: Stream, setting: Setting, tasks: int | None = None) -> Kept:
    """The features of an arm: of each task's images under the model before and after it, of the others at the end."""
    path = stream.file(setting, tasks)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_trained(stream, setting, tasks), path)
    return Kept(**torch.load(path, weights_only=True))


def _trained(stream: Stream, setting: Setting, tasks: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    setup = stream.setup(setting)
    method, found = setup.method, dict[str, Any](old=[], new=[], labels=[])
    learned = list(setup.stream)[:tasks]
    for task in learned:
        found["labels"].append(task.train.labels)
        found["old"].append(None if task.index == 0 else features(setup, task.train.indices))
        seed_all(stream.seed, task.index, "begin")
        method.module.train()
        method.begin_task(task, setup.statistics_loader(task))
        if task.index > 0 and setting.arm != FROZEN:
            train_epochs(setup, task, EPOCHS, [0.0, 0])
        seed_all(stream.seed, task.index, "end")
        method.end_task(task, setup.statistics_loader(task))
        found["new"].append(features(setup, task.train.indices))
    found["parts"] = {
        part: [(features(setup, (p := getattr(t, part)).indices), p.labels) for t in learned]
        for part in (["val"] if stream.seed == SEARCHED else []) + (["test"] if tasks is None else [])
    }
    return found | {"models": [], "seconds_per_step": 0.0}


def chosen_setting(stream: Stream, arm: str) -> Setting:
    """Rate and weight by the validation AA of the best ``gda`` after the first tasks of the searched seed."""
    if arm == FROZEN:
        return Setting(FROZEN)
    grid = [Setting(arm, *point) for point in GRID[arm][1]]
    return max(grid, key=lambda setting: _validation(stream, setting))


def _validation(stream: Stream, setting: Setting) -> float:
    path = stream.file(setting, SEARCHED_TASKS).with_suffix(".json")

    def best() -> float:
        kept = view(train(stream, setting, SEARCHED_TASKS), early=False)
        return max(value.aa for value in gaussian_scores(kept).values())

    return float(remembered(path, best))


class Shrinkage(NamedTuple):
    """Of ``gda``: share of the identity, and of the covariance that all classes share."""

    alpha: float
    beta: float


SHRINKAGES = tuple(Shrinkage(alpha, 0.9) for alpha in ALPHAS)


def densities(kept: Kept, shrinkages: Iterable[Shrinkage], part: str) -> dict[Shrinkage, list[Tensor]]:
    """Log densities of all classes by ``gda`` on each task's images: float32 ``[n, K]``."""
    found, rows = statistics(kept), [x.float() for x, _ in kept.parts[part]]
    heads = {one: Gaussians(*gaussian_classifier(found, *one)).float() for one in shrinkages}
    return {one: [head(x) for x in rows] for one, head in heads.items()}


def accuracy(kept: Kept, scores: Iterable[Tensor], part: str) -> float:
    """AA in percent of scores on each task's images."""
    pairs = zip(scores, kept.parts[part], strict=True)
    return 100 * float(torch.stack([(s.argmax(1) == y).double().mean() for s, (_, y) in pairs]).mean())


def head_settings(kept: Kept) -> dict[str, Any]:
    """Shrinkage by validation AA: of ``lda``, and of ``gda`` for both views."""
    last, chosen = view(kept, early=False), {}
    found = statistics(last)
    for early, name in VIEWS:
        one = view(kept, early=early)
        scores = {key: accuracy(one, value, "val") for key, value in densities(one, SHRINKAGES, "val").items()}
        chosen[name] = max(scores, key=scores.__getitem__)
    lda_alpha = max(ALPHAS, key=lambda alpha: score(last, lda(last, found, alpha, "class"), "val").aa)
    return {"lda": lda_alpha, **chosen}


VIEWS = ((False, "gda"), (True, "gda, first block"))


def test(kept: Kept, first: Kept, own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Test AA of every head, in percent; ``two`` averages the log densities of the first model and of this one.

    ``own`` and ``other`` are the :func:`head_settings` of this arm and of frozen features.
    """
    last = view(kept, early=False)
    found = {
        "lda": score(last, lda(last, statistics(last), own["lda"], "class"), "test").aa,
        "ncm": score(last, ncm(last), "test").aa,
        "ranpac": score(last, ranpac(last, RANDOM_FEATURES), "test").aa,
    }
    for early, name in VIEWS:
        (mine,), (theirs,) = (
            densities(view(one, early=early), [Shrinkage(*settings[name])], "test").values()
            for one, settings in ((kept, own), (first, other))
        )
        found[name] = accuracy(last, mine, "test")
        found[f"{name}, two"] = accuracy(last, [a + b for a, b in zip(mine, theirs, strict=True)], "test")
    return found
