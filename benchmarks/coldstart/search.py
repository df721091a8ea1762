"""The searched table of docs/results/cold-start.md: an arm is trained once per setting, all heads are fitted to it.

All arms of a stream and seed start from one task-0 model. Rate and weight are chosen on validation images of seed 0
after its first tasks, the heads' shrinkage on those after all of them; the other seeds are only tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.heads.fit import Classify, Gaussian, Kept, gaussian_scores, gda, lda, ncm, ranpac, score, statistics
from benchmarks.heads.runs import train_epochs
from benchmarks.pages import remembered
from infssm._seeding import seed_all
from infssm.bench.experiment import Experiment
from infssm.learner.config.load import load_config, merge
from infssm.learner.setup import Setup, build
from infssm.methods.core.views import FittedConfig, Views

FROZEN = "frozen"
ARMS: dict[str, tuple[dict[str, Any], tuple[float | None, ...]]] = {
    "plain": ({"name": "seq"}, (None,)),
    "lwf": ({"name": "lwf"}, (1.0, 10.0)),
    "lwf-f": ({"name": "lwf-f"}, (1.0, 10.0)),
    "efc": ({"name": "efc"}, (1.0, 10.0)),
    "lwf-ac": ({"name": "lwf-ac"}, (1e2, 1e4)),
    "output": ({"name": "inf-ssm-exact"}, (15.0, 150.0)),
}
"""Methods, and the weights that are tried."""
RATES = (1e-4, 1e-3)
EPOCHS = 5
"""Of a later task, in this table."""
SEARCHED_TASKS = 2
ALPHAS = (1e-3, 1e-2, 1e-1)
RANDOM_FEATURES = 1024


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

    def setup(self, setting: Setting) -> Setup:
        """Stream, recipe, model and method as ``infssm run`` would build them after task 0."""
        shared = load_config(self.values)
        first = Experiment.of(shared).task0_weights
        options = {} if setting.arm == FROZEN else ARMS[setting.arm][0]
        weight = {} if setting.weight is None else {"weight": setting.weight}
        changes = {"method": {"name": "seq", **options, **weight}, "train": {"lr": setting.rate}}
        config = load_config(merge({key: value for key, value in self.values.items() if key != "method"}, changes))
        return build(config, torch.device("cpu"), task0=first)


@torch.no_grad()
def features(setup: Setup, views: Views, rows: Any) -> Tensor:
    """Class and mean tokens of images and their mirror images, without augmentation: ``[n, 2d]``."""
    model = setup.method.module.eval()
    pixels = setup.stream.dataset.images.pixels
    parts = torch.from_numpy(rows).split(250)
    return torch.cat([views(model, setup.recipe.eval(pixels[part])) for part in parts])


def train(stream: Stream, setting: Setting, tasks: int | None = None) -> Kept:
    """The features of an arm: of each task's images under the model before and after it, of the others at the end."""
    path = stream.out / stream.name / f"{stream.seed}-{setting.label}-{tasks or 'all'}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_trained(stream, setting, tasks), path)
    return Kept(**torch.load(path, weights_only=True))


def _trained(stream: Stream, setting: Setting, tasks: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    setup, views = stream.setup(setting), Views(FittedConfig(mean_token=True, mirror=True))
    method, found = setup.method, dict[str, Any](old=[], new=[], labels=[])
    learned = list(setup.stream)[:tasks]
    for task in learned:
        found["labels"].append(task.train.labels)
        found["old"].append(None if task.index == 0 else features(setup, views, task.train.indices).double())
        seed_all(stream.seed, task.index, "begin")
        method.module.train()
        method.begin_task(task, setup.statistics_loader(task))
        if task.index > 0 and setting.arm != FROZEN:
            train_epochs(setup, task, EPOCHS, [0.0, 0])
        seed_all(stream.seed, task.index, "end")
        method.end_task(task, setup.statistics_loader(task))
        found["new"].append(features(setup, views, task.train.indices).double())
    found["parts"] = {
        part: [(features(setup, views, (p := getattr(t, part)).indices).double(), p.labels) for t in learned]
        for part in ("val", "test")
    }
    return found | {"models": [], "seconds_per_step": 0.0}


def chosen_setting(stream: Stream, arm: str) -> Setting:
    """Rate and weight by the validation AA of the best ``gda`` after the first tasks of the searched seed."""
    if arm == FROZEN:
        return Setting(FROZEN)
    grid = [Setting(arm, rate, weight) for rate, weight in itertools.product(RATES, ARMS[arm][1])]
    return max(grid, key=lambda setting: _validation(stream, setting))


def _validation(stream: Stream, setting: Setting) -> float:
    path = stream.out / stream.name / f"{stream.seed}-{setting.label}-{SEARCHED_TASKS}.json"

    def best() -> float:
        return max(value.aa for value in gaussian_scores(train(stream, setting, SEARCHED_TASKS)).values())

    return float(remembered(path, best))


def head_settings(kept: Kept, first: Kept) -> dict[str, Any]:
    """Shrinkage of every head by validation AA: of ``gda`` for this model, and for the first one beside it."""
    found = statistics(kept)
    ours, theirs = ({g: v.aa for g, v in gaussian_scores(one).items() if g.prior == "class"} for one in (kept, first))
    return {
        "gda": tuple(max(ours, key=ours.__getitem__)),
        "first": tuple(max(theirs, key=theirs.__getitem__)),
        "lda": max(ALPHAS, key=lambda alpha: score(kept, lda(kept, found, alpha, "class"), "val").aa),
    }


def test(kept: Kept, first: Kept, settings: Mapping[str, Any]) -> dict[str, float]:
    """Test AA of every head, in percent; ``two`` averages the log densities of the first model and of this one."""
    found = statistics(kept)
    heads: dict[str, Callable[[], Classify]] = {
        "gda": lambda: gda(kept, found, Gaussian(*settings["gda"])),
        "lda": lambda: lda(kept, found, settings["lda"], "class"),
        "ncm": lambda: ncm(kept),
        "ranpac": lambda: ranpac(kept, RANDOM_FEATURES),
    }
    scores = {name: score(kept, head(), "test").aa for name, head in heads.items()}
    own, other = heads["gda"](), gda(first, statistics(first), Gaussian(*settings["first"]))
    pairs = zip(kept.parts["test"], first.parts["test"], strict=True)
    right = [((own(x) + other(z)).argmax(1) == y).double().mean() for (x, y), (z, _) in pairs]
    return scores | {"two": 100 * float(torch.stack(right).mean())}
