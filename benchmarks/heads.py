"""docs/results/heads.md: every head on the features of every arm, on digits from scratch and from the Omniglot start.

    python -m benchmarks.heads --out RUNS      # RUNS keeps the run directories, resumable

An arm is trained once for each learning rate and seed; all heads are fitted to its features, so heads cost nothing
extra. Learning rate and the head's settings are those with the best AA on validation images, averaged over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.digits_results import BASE
from benchmarks.results import ROOT, SEEDS, machine, spread
from infssm.methods.heads._drift import MapDrift
from infssm.methods.heads._fitting import gaussian_classifier, lda_classifier, ridge_classifier
from infssm.methods.heads._gaussians import Gaussians
from infssm.methods.heads._statistics import ClassStatistics, StatisticsSums
from infssm.methods.heads.ranpac import best_ridge
from infssm.train import Result, load_config, merge, run
from infssm.train.setup import build, load_weights

RATES = (1e-4, 1e-3)
ARMS: dict[str, dict[str, Any]] = {
    "frozen": {"name": "frozen+lda"},
    "plain": {"name": "seq"},
    "lwf-f": {"name": "lwf-f"},
    "inf-ssm-exact": {"name": "inf-ssm-exact"},
    "lwf-ac": {"name": "lwf-ac"},
}
STARTS: dict[str, dict[str, Any]] = {
    "scratch": {},
    # Task 0 has two classes: at the rate for a model from scratch it would undo what the start knows.
    "omniglot": {"model": {"weights": "omniglot"}, "train": {"lr": 1e-4, "min_lr": 1e-6, "warmup_lr": 1e-6}},
}
ALPHAS, BETAS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1), (0.25, 0.5, 0.75)
Classify = Callable[[Tensor], Tensor]


class Features(NamedTuple):
    """Features of all images after each task, ``[tasks, images, d]``; per part and task the images it has."""

    values: Tensor
    labels: Tensor
    parts: dict[str, list[Tensor]]
    linear: float


class Score(NamedTuple):
    """AA in percent on validation and test images after the last task."""

    val: float
    test: float


def features(result: Result, *, still: bool) -> Features:
    """Features of a finished run under the weights that each task ended with, alike after all where they stay."""
    setup = build(load_config(result.path / "config.yaml"), torch.device("cpu"), weights=False)
    stream, model = setup.stream, setup.method.module.eval()
    images, found = setup.recipe.eval(stream.dataset.images.pixels), []
    for task in range(1 if still else stream.num_tasks):
        load_weights(model, result.path / "checkpoints" / f"task_{task:02}.safetensors")
        with torch.no_grad():
            found.append(torch.cat([_pooled(model, part) for part in images.split(256)]))
    parts = {
        name: [torch.from_numpy(getattr(task, name).indices) for task in stream] for name in ("train", "val", "test")
    }
    labels = torch.zeros(len(images), dtype=torch.int64)
    for task, name in itertools.product(stream, parts):
        part = getattr(task, name)
        labels[torch.from_numpy(part.indices)] = part.labels
    values = torch.stack(found).double().expand(stream.num_tasks, -1, -1)
    return Features(values, labels, parts, 100 * result.aa)


def _pooled(model: Any, images: Tensor) -> Tensor:
    pooled: Tensor = model.forward_head(model.forward_features(images), pre_logits=True)
    return pooled


def kept(data: Features, *, drift: bool = True) -> ClassStatistics:
    """Statistics of all classes after the last task, each taken at the end of its own and moved since."""
    found: ClassStatistics | None = None
    classes, width = int(data.labels.max()) + 1, data.values.shape[2]
    for task, rows in enumerate(data.parts["train"]):
        sums = StatisticsSums(classes, width, per_class=True)
        sums.add(data.values[task, rows], data.labels[rows])
        if found is not None and drift:
            motion = MapDrift(width, ridge=0.05)
            motion.add(data.values[task - 1, rows], data.values[task, rows])
            found = motion.moved(found)
        found = sums.statistics() if found is None else found.replaced(sums.statistics())
    assert found is not None
    return found


def heads(data: Features, *, still: bool) -> Iterator[tuple[str, str, Classify]]:
    """Every head with every setting: name, setting, classifier; where features stay there is no drift to follow."""
    moved = kept(data, drift=not still)
    both = [("", moved)] if still else [("", moved), (", no drift", kept(data, drift=False))]
    for name, found in ((f"lda{how}", found) for how, found in both):
        for alpha in ALPHAS:
            weight, bias = lda_classifier(found, alpha)
            yield name, f"α {alpha:g}", lambda x, w=weight, b=bias: x @ w.T + b
    for name, found in ((f"gda{how}", found) for how, found in both):
        for alpha, beta in itertools.product(ALPHAS, BETAS):
            head = Gaussians(*gaussian_classifier(found, alpha, beta)).double()
            yield name, f"α {alpha:g}, β {beta:g}", head
    yield "ranpac", "", ranpac(data)


def ranpac(data: Features) -> Classify:
    """Random features of the width that the head takes by default, sums over tasks, the ridge as the head finds it."""
    width = data.values.shape[2]
    projection = torch.randn(width, 16 * width, generator=torch.Generator().manual_seed(0)).double()
    gram, cross, ridge = torch.zeros(()), torch.zeros(()), 1.0
    for task, rows in enumerate(data.parts["train"]):
        hidden = F.relu(data.values[task, rows] @ projection)
        targets = F.one_hot(data.labels[rows], int(data.labels.max()) + 1).double()
        held = torch.arange(len(rows)) % 5 == 4
        sums = [hidden[m].T @ y[m] for m in (~held, held) for y in (hidden, targets)]
        ridge = best_ridge(gram + sums[0], cross + sums[1], sums[2], sums[3])
        gram, cross = gram + sums[0] + sums[2], cross + sums[1] + sums[3]
    weight = ridge_classifier(gram, cross, ridge)
    assert weight is not None
    return lambda x: F.relu(x @ projection) @ weight.T


def score(data: Features, classify: Classify) -> Score:
    """AA over the tasks after the last one."""
    values = {}
    for part in ("val", "test"):
        right = [(classify(data.values[-1, r]).argmax(1) == data.labels[r]).double().mean() for r in data.parts[part]]
        values[part] = 100 * float(torch.stack(right).mean())
    return Score(**values)


def measure(start: str, arm: str, out: Path, rates: Sequence[float]) -> dict[str, dict[str, list[Score]]]:
    """Scores by head and setting (learning rate among them), one for each seed."""
    found: dict[str, dict[str, list[Score]]] = {}
    for rate, seed in itertools.product(rates[:1] if arm == "frozen" else rates, SEEDS):
        first = merge(merge(BASE, STARTS[start]), {"seed": seed, "out": str(out), "train": {"threads": 1}})
        begin = run(load_config(merge(first, {"method": ARMS["frozen"]})), quiet=True)  # trains task 0 for all
        task0 = str(begin.path.resolve() / "checkpoints" / "task_00.safetensors")
        chosen = {"method": ARMS[arm], "train": {"lr": rate, "min_lr": rate / 100, "warmup_lr": rate / 100}}
        result = (
            begin
            if arm == "frozen"
            else run(load_config(merge(merge(first, chosen), {"train": {"task0": task0}})), quiet=True)
        )
        data = features(result, still=arm == "frozen")
        for head, setting, classify in heads(data, still=arm == "frozen"):
            label = ", ".join(part for part in ("" if arm == "frozen" else f"lr {rate:g}", setting) if part)
            found.setdefault(head, {}).setdefault(label, []).append(score(data, classify))
        if arm != "frozen":
            linear = Score(data.linear, data.linear)
            found.setdefault("linear, best on test", {}).setdefault(f"lr {rate:g}", []).append(linear)
        print(f"{start}, {arm}, lr {rate:g}, seed {seed}: done", flush=True)
    return found


def best(settings: dict[str, list[Score]]) -> str:
    """The setting with the best mean AA on validation images."""
    return max(settings, key=lambda key: statistics.mean(s.val for s in settings[key]))


INTRODUCTION = """# Heads without exemplars, on digits

scikit-learn's digits in five tasks of two classes, Vim-nano (8 x 8 pixels, patch 2, depth 4, width 64), from scratch
and from the [Omniglot start](../weights.md). All arms share the task-0 model of their seed (learning rate 1e-3 from
scratch, 1e-4 from the start); `frozen` stops there, the others go on at the learning rate of the table (searched:
{rates}), with their default weights. No images are kept by any of them. Every head is fitted to the features of the
same runs; `no drift` leaves the statistics of old classes where they were. Learning rate, α and β are those with the
best AA on validation images, averaged over the seeds {seeds}, from the same grid for every arm; test images played no
part, except that `linear`, the classifier trained with the model, is shown at its better learning rate on test images.
AA in percent, mean ± sample deviation; the last column is paired over the seeds, mean ± standard error. Made by
`python -m benchmarks.heads --arms {arms} --rates {rates} --out RUNS`; all numbers in `heads.json` beside this page."""


def page(found: dict[str, dict[str, dict[str, dict[str, list[Score]]]]], searched: Sequence[float]) -> str:
    """The page as Markdown."""
    arms, rates = " ".join(found["scratch"]), " ".join(f"{rate:g}" for rate in searched)
    lines = [INTRODUCTION.format(arms=arms, rates=rates, seeds=", ".join(map(str, SEEDS)))]
    if missing := [arm for arm in ARMS if arm not in found["scratch"]]:
        lines += ["", f"Not in this table: {', '.join(missing)}; the command without `--arms` and `--rates` has them."]
    for start, tables in found.items():
        lines += ["", f"## From {'scratch' if start == 'scratch' else 'the Omniglot start'}", ""]
        lines += ["| arm | head | chosen | AA | validation AA | AA - frozen, same head |", "|---|---|---|---|---|---|"]
        for arm, table in tables.items():
            for head, settings in table.items():
                setting = best(settings)
                scores = settings[setting]
                cells = [spread([s.test for s in scores]), f"{statistics.mean(s.val for s in scores):.1f}"]
                if head.startswith("linear"):
                    cells[1] = "-"
                lines.append(
                    f"| {arm} | {head} | {setting or '-'} | {' | '.join([*cells, _gain(tables, arm, head, scores)])} |"
                )
    return "\n".join(lines) + "\n"


def _gain(arms: dict[str, Any], arm: str, head: str, scores: list[Score]) -> str:
    other = arms.get("frozen", {}).get(head)
    if arm == "frozen" or other is None:
        return "-"
    values = [a.test - b.test for a, b in zip(scores, other[best(other)], strict=True)]
    return f"{statistics.mean(values):+.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder for run directories")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates to search")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = ROOT / "docs" / "results"
    found: dict[str, dict[str, Any]] = {start: {} for start in STARTS}
    for arm, start in itertools.product(args.arms, STARTS):
        found[start][arm] = measure(start, arm, args.out, args.rates)
        (folder / "heads.md").write_text(page(found, args.rates), encoding="utf-8")
        data = {"environment": machine(), "seeds": SEEDS, "arms": ARMS, "scores": found}
        (folder / "heads.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
