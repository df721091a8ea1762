"""`python -m benchmarks.first_session`: pre-trained weights as they are, tuned on task 0 (all or LoRA), or both.

Three streams: digits from the package's Omniglot weights; CIFAR-100's 50 base classes, which the weights
`cifar100-base` know, then 5 tasks of 10; and the other 50 classes, which these weights have never seen, as a folder of
images that this script writes. The learning rate and LoRA's rank are chosen by AA of `gda` on validation data of the
first seed, the rates among the same values. Writes `docs/results/first-session.json` and the table of
`docs/results/first-session.md`. A quarter of an hour of one core; what is complete is read again.

Only task 0 is trained, by a run of its own. The features of all images are then computed once for every model, and the
heads are fitted to them with all classes at once: what they know is sums over classes, so it is the classifier they
have after the last task of a run of `frozen+<head>`.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.pages import markdown_table, remembered, remembered_tensors, spread
from benchmarks.presets import SEEDS, configuration, make_page, result
from infssm.data import TaskStream, load_dataset
from infssm.learner.config.load import merge
from infssm.learner.setup import build, load_stream
from infssm.methods import Batch, TaskInfo, build_method
from infssm.models.features import features

Options = dict[str, Any]
Part = tuple[Tensor, Tensor]
"""Features ``[n, d]`` and labels ``[n]``."""


class Stream(NamedTuple):
    """A preset and what is changed of it; a part of the images, so that one core is enough."""

    preset: str
    changes: Options


BASE, OTHER = "CIFAR-100, known classes", "image folder, unknown classes"
KNOWN: Options = {"model": {"weights": "cifar100-base"}, "train": {"batch_size": 30, "num_workers": 0}}
STREAMS = {
    "digits": Stream("digits/5-task/frozen+gda", {}),
    BASE: Stream(
        "cifar100/b50-5/seq",
        {"data": {"train_per_class": 40, "test_per_class": 20}, "train": {"task0_epochs": 2}},
    ),
    OTHER: Stream(
        "cifar100/b50-5/seq",
        {
            "benchmark": "folder/5-task",
            "data": {"base_classes": None, "num_tasks": 5, "train_per_class": 100, "test_per_class": 30},
            "train": {"task0_epochs": 4},
        },
    ),
}
HEADS = ("ncm", "gda", "ranpac")
RATES = (3e-4, 1e-3, 3e-3)
AS_IS, FULL, LORA = "as pre-trained", "task 0 tunes all weights", "task 0 tunes LoRA"
CHOICES = {FULL: ({},), LORA: tuple({"first_session": "lora", "rank": rank} for rank in (4, 16))}
IMAGES = 200
"""Written for each class of the folder; its split leaves 144 to train, 16 to validate and 40 to test."""


@cache
def folder(out: Path) -> Path:
    """The 50 classes of CIFAR-100 that `cifar100-base` has not seen, a folder of PNG files each."""
    dataset, path = load_dataset("cifar100"), out / "cifar100-other"
    stream = load_stream(configuration(STREAMS[BASE].preset, out, 0))
    for label in stream.class_order[stream.task_sizes[0] :]:
        into = path / dataset.classes[label]
        into.mkdir(parents=True, exist_ok=True)
        for index in (dataset.labels[: len(dataset) - dataset.num_test] == label).nonzero()[0][:IMAGES]:
            if not (file := into / f"{index:05}.png").exists():
                dataset.images.pil(int(index)).save(file)
    return path


class Model(NamedTuple):
    """How the weights came about: as they are where there is no rate."""

    rate: float | None = None
    options: Options | None = None


class Measured:
    """One stream: what its models and heads reach."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.preset, changes = STREAMS[name]
        self.changes = changes if name == "digits" else merge(KNOWN, changes)
        if name == OTHER:
            self.changes = merge(self.changes, {"data": {"name": str(folder(out)), "image_size": 32}})
        self.stream: TaskStream = load_stream(configuration(self.preset, out, 0, self.changes))

    def features(self, model: Model, seed: int) -> dict[str, list[Part]]:
        """Of the images of every task, by part; kept in a file."""
        words = [self.name, *(model.options or {}).values(), model.rate, seed if model.rate else 0]
        path = self.out / "features" / ("-".join(map(str, words)).replace(" ", "") + ".pt")
        found: dict[str, list[Part]] = remembered_tensors(path, lambda: self._compute(model, seed))
        return found

    def _compute(self, model: Model, seed: int) -> dict[str, list[Part]]:
        weights = "skip"
        if model.rate is not None:
            first = {
                "tasks": [self.stream.class_order[: self.stream.task_sizes[0]].tolist()],
                "base_classes": None,
                "class_order_seed": None,
            }
            tuned = {"method": {"name": "frozen", **(model.options or {})}, "train": {"lr": model.rate}, "data": first}
            found = result(self.preset, self.out, seed, self.changes, tuned)
            weights = str(found.path / "checkpoints" / "task_00.safetensors")
        config = configuration(
            self.preset, self.out, seed, self.changes, {"method": {"name": "frozen"}, "train": {"task0": weights}}
        )
        setup = build(config, torch.device("cpu"), stream=self.stream)
        module = setup.method.module.eval()

        @torch.no_grad()
        def of(loader: Any) -> Part:
            rows = [(features(module, batch.x), batch.y) for batch in loader]
            return torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])

        loaders = {"train": setup.plain_loader, "test": partial(setup.eval_loader, part="test")}
        if seed == SEEDS[0]:
            loaders["val"] = partial(setup.eval_loader, part="val")
        tasks = range(self.stream.num_tasks)
        return {part: [of(loader(setup.task(task))) for task in tasks] for part, loader in loaders.items()}

    def accuracies(self, head: str, models: list[Model], seed: int, part: str) -> list[float]:
        """Of every task among all classes, in percent; features of several models as `start_model` joins them."""
        found = [self.features(model, seed) for model in models]
        joined = found if head == "gda" else [_beside(found)]
        scores = [_scores(head, one["train"], one[part], seed) for one in joined]
        labels = [y for _, y in found[0][part]]
        means = [sum(several) / len(several) for several in zip(*scores, strict=True)]
        return [100 * float((mean.argmax(1) == y).double().mean()) for mean, y in zip(means, labels, strict=True)]


def _beside(found: list[dict[str, list[Part]]]) -> dict[str, list[Part]]:
    """Features of several models in one row."""
    return {
        part: [
            (torch.cat([x for x, _ in rows], dim=1), rows[0][1])
            for rows in zip(*(one[part] for one in found), strict=True)
        ]
        for part in found[-1]  # the tuned model has no validation features but for the first seed
    }


def _scores(head: str, train: list[Part], asked: list[Part], seed: int) -> list[Tensor]:
    """Of each task's images for every class, by a head that was given all classes."""
    x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
    classes = int(y.max()) + 1
    module = nn.Sequential(OrderedDict(head=nn.Linear(x.shape[1], classes)))
    width = {"width": 1000} if head == "ranpac" else {}
    method = build_method(module, f"frozen+{head}", num_classes=classes, num_tasks=1, seed=seed, **width)
    task = TaskInfo(0, range(classes))
    method.begin_task(task, [Batch(x, y)])
    method.end_task(task, [Batch(x, y)])
    return [method.module(rows) for rows, _ in asked]


def measure(name: str, out: Path) -> dict[str, Any]:
    """Every model under every head on one stream."""
    stream = Measured(name, out)
    kept = out / f"{name}.json"

    def tested(head: str, models: list[Model]) -> list[dict[str, float]]:
        found = [stream.accuracies(head, models, seed, "test") for seed in SEEDS]
        return [{"aa": sum(a) / len(a), "first": a[0], "later": sum(a[1:]) / len(a[1:])} for a in found]

    def chosen(title: str) -> tuple[Model, list[Any]]:
        models = [Model(rate, options) for rate in RATES for options in CHOICES[title]]
        found = [stream.accuracies("gda", [model], SEEDS[0], "val") for model in models]
        aas = [sum(a) / len(a) for a in found]
        search = [{"rate": m.rate, **(m.options or {}), "aa": aa} for m, aa in zip(models, aas, strict=True)]
        return models[aas.index(max(aas))], search

    def row(title: str) -> dict[str, Any]:
        models, search = [Model()], []
        if title != AS_IS:
            tuned, search = chosen(title.removeprefix(f"{AS_IS} beside "))
            models = [*models, tuned] if title.startswith(AS_IS) else [tuned]
        used = models[-1]
        heads = {head: tested(head, models) for head in HEADS}
        return {"rate": used.rate, **(used.options or {}), "validation": search, "heads": heads}

    titles = (AS_IS, FULL, LORA, f"{AS_IS} beside {FULL}", f"{AS_IS} beside {LORA}")
    return {title: remembered(kept, partial(row, title), title) for title in titles}


def table(rows: dict[str, Any]) -> list[str]:
    """One line per stream and model."""
    lines = []
    for stream, models in rows.items():
        for title, row in models.items():
            settings = "-" if row["rate"] is None else f"{row['rate']:g}"
            settings += f", rank {row['rank']}" if "rank" in row else ""
            cells = [spread([one["aa"] for one in row["heads"][head]]) for head in HEADS]
            lines.append([stream, title, settings, *cells])
    return markdown_table(["stream", "features", "rate", *(f"`frozen+{head}`" for head in HEADS)], lines)


if __name__ == "__main__":
    make_page("first-session", __doc__, list(STREAMS), measure, table)
