"""`python -m benchmarks.paper_regime`: do the paper's methods keep their order on a small pre-trained model?

Five equal tasks of the 50 classes of CIFAR-100 that the packaged weights `cifar100-base` have not seen, a linear
classifier, nothing stored. Every arm has the same search for learning rate and weight, by AA on validation data of
the first seed. Writes `docs/results/paper-regime.json` and the table of `docs/results/paper-regime.md`. A run takes
10 to 20 seconds of one core; outcomes that are there are read again, and `--arms` measures a part.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from benchmarks.pages import (
    RESULTS,
    machine,
    markdown_table,
    paired_gain,
    read_json,
    remembered,
    spread,
    write_json,
    write_table,
)
from benchmarks.presets import SEEDS, result
from infssm import record_states
from infssm.bench.presets.load import paper_numbers
from infssm.methods.bases.seq import Seq, SeqConfig
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import Context, Loader, TaskInfo
from infssm.models.features import output_layer
from infssm.ssm import unwrap

PAGE = RESULTS / "paper-regime.md"
UNSEEN = np.random.RandomState(0).permutation(100)[50:]
"""Classes that `cifar100-base` was not trained on: the second half of class order 0."""
FIRST_RATE = 1e-3
"""Learning rate of task 0, whose model all arms of a seed share."""
RATES = (1e-3, 3e-4)
"""Learning rates of the later tasks that are searched."""


class Arm(NamedTuple):
    """A method, the weights searched, the options that a weight stands for, and the paper's name of the method."""

    method: str
    weights: tuple[float | str, ...] = ()
    factors: Mapping[str, float] = {"weight": 1.0}
    rates: tuple[float, ...] = RATES
    paper: str = ""
    options: Mapping[str, Any] = {}


ARMS = {
    "seq": Arm("seq", paper="Seq"),
    "inf-ssm": Arm("inf-ssm", (2e-1, 2e2, 2e5), paper="Inf-SSM"),
    "ewc": Arm("ewc", (2.5e3, 2.5e4, 2.5e5, 2.5e7), paper="EWC"),
    "lwf-abc": Arm("lwf-abc", (2.5e2, 2.5e3, 2.5e4), {"weight": 1.0, "b_weight": 0.2}, paper="LwF-ABC"),
    "lwf-ac": Arm("lwf-ac", (2.5e2, 2.5e3, 2.5e4)),
    "inf-ssm-exact": Arm("inf-ssm-exact", ("auto", 1e3, 1e4)),
    "lwf-f": Arm("lwf-f", (1.0, 1e1, 1e2)),
    "lwf": Arm("lwf", (1.0, 1e1, 1e2)),
    "seq at 3e-4": Arm("seq", rates=(3e-4,)),
    "seq at 1e-4": Arm("seq", rates=(1e-4,)),
    "frozen+gda": Arm("frozen+gda", rates=(FIRST_RATE,)),
    "only what (A, C) cannot reach": Arm("seq-part", options={"trained": "unreached"}),
    "only the classifier": Arm("frozen"),
    "si": Arm("si", (1e5, 1e6, 1e7, 1e9), paper="SI"),
    "mas": Arm("mas", (1e1, 1e2, 1e3, 1e5), paper="MAS"),
    "only what (A, C) reach, and the classifier": Arm("seq-part", options={"trained": "reached"}),
    "inf-ssm+": Arm("inf-ssm+", (2e-3, 2.0, 2e3), paper="Inf-SSM+", options={"gamma": 100.0}),
    "joint": Arm("joint", rates=(FIRST_RATE,)),
}


class PartConfig(SeqConfig):
    """Options of :class:`Part`."""

    trained: Literal["reached", "unreached"] = Field(
        "unreached", description="entries of the parameters that move after task 0, by whether A and C depend on them"
    )


@register_method
class Part(Seq):
    """Plain training after task 0 of those entries of the parameters on which A and C of the layers (do not) depend.

    The classifier is always trained. The other entries are put back after each step, whatever the optimizer does.
    """

    name = "seq-part"
    online: ClassVar[bool] = False
    Config = PartConfig
    config: PartConfig

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """From the second task on, note the entries that are held, and their values."""
        super().begin_task(task, loader)
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []
        if task.index == 0:
            return
        module = unwrap(self.context.module)
        classifier = {id(p) for p in output_layer(module).parameters()}
        for parameter, reached in reached_entries(self.context).items():
            held = reached if self.config.trained == "unreached" else ~reached
            if id(parameter) not in classifier:
                self._held.append((parameter, held, parameter.detach().clone()))

    def after_step(self) -> None:
        """Put back what is held."""
        with torch.no_grad():
            for parameter, held, value in self._held:
                parameter.copy_(torch.where(held, value, parameter))


def reached_entries(context: Context) -> dict[Tensor, Tensor]:
    """Of every parameter the entries with a gradient from A or C of any layer, as masks of its shape."""
    module, rng = unwrap(context.module), torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 32, 32, generator=rng)
    with torch.enable_grad(), record_states(module) as states:
        module(images)
        values = [value for layer in states.values() for space in layer for value in (space.a, space.c)]
        total = torch.stack([(value * torch.randn(value.shape, generator=rng)).sum() for value in values]).sum()
    parameters = [p for p in module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
    return {p: gradient != 0 for p, gradient in zip(parameters, gradients, strict=True)}


def outcome(arm: Arm, out: Path, rate: float, weight: float | str | None, seed: int, part: str) -> dict[str, float]:
    """AA, task-incremental AA and FM in percent on one part of the data."""
    tasks = np.random.RandomState(seed).permutation(UNSEEN).reshape(5, 10).tolist()
    options = dict(arm.options)
    if weight is not None:
        options |= {k: weight if isinstance(weight, str) else f * weight for k, f in arm.factors.items()}
    data = {"tasks": tasks, "class_order_seed": None, "train_per_class": 40, "test_per_class": 25, "evaluate": part}
    train = {"epochs": 3, "task0_epochs": 3, "batch_size": 20, "lr": FIRST_RATE}
    changed = {
        "data": data,
        "model": {"weights": "cifar100-base"},
        "method": {"name": arm.method, **options},
        "train": train | {"lr_scale": rate / FIRST_RATE, "lr_scale_variant": "once"},
    }

    def measured() -> dict[str, float]:
        found = result("cifar100/cold-5/seq", out, seed, changed).matrix
        return {"aa": 100 * found.aa, "task_incremental": 100 * found.task_incremental.aa, "fm": 100 * found.fm()}

    name = "-".join((arm.method, *map(str, options.values()), f"{rate:g}", str(seed), part))
    return remembered(out / "outcomes" / f"{name}.json", measured)  # type: ignore[no-any-return]


def measure(arm: Arm, out: Path) -> dict[str, Any]:
    """The search of an arm, and its outcomes on test data: weights at one rate, then rates at the best weight.

    Where the best weight is the first or the last, one more beyond it is tried.
    """
    search: dict[str, float] = {}

    def validated(rate: float, weight: float | str | None) -> float:
        found = outcome(arm, out, rate, weight, SEEDS[0], "val")["aa"]
        search[f"{rate:g}, {weight}"] = round(found, 6)  # so that the first of equals is taken, not the last digit's
        return round(found, 6)

    weight = max(arm.weights, key=partial(validated, RATES[0]), default=None)
    numbers = [number for number in arm.weights if not isinstance(number, str)]
    if numbers and weight in (numbers[0], numbers[-1]):
        low, high = (numbers[1], numbers[0]) if weight == numbers[0] else (numbers[-2], numbers[-1])
        weight = max(weight, high**2 / low, key=partial(validated, RATES[0]))
    rate = max(arm.rates, key=lambda rate: validated(rate, weight)) if len(arm.rates) > 1 else arm.rates[0]
    tests = [outcome(arm, out, rate, weight, seed, "test") for seed in SEEDS]
    return {"rate": rate, "weight": weight, "validation": search, "test": tests}


def published(name: str) -> list[str]:
    """AA and FM of the paper's Vim-small on CIFAR-100 in 5 tasks, its Tables 2 and 11 (Inf-SSM+: Table 9)."""
    table = "Table 9" if name == "Inf-SSM+" else "Table 11"
    for row in paper_numbers()["results"]:
        if (row["table"], row["dataset"], row["n_tasks"], row["method"]) == (table, "CIFAR-100", 5, name):
            return [f"{row[key]['mean']:.1f} ± {row[key]['std']:.1f}" for key in ("AA", "FM")]
    return ["", ""]


def table(found: dict[str, Any]) -> list[str]:
    """One line per arm that is complete, by AA."""
    plain = [test["aa"] for test in found["seq"]["test"]]
    mean_aa = {name: np.mean([test["aa"] for test in row["test"]]) for name, row in found.items()}
    lines = []
    for name in sorted(found, key=mean_aa.__getitem__, reverse=True):
        row, arm = found[name], ARMS[name]
        aa, within, forgetting = ([test[key] for test in row["test"]] for key in ("aa", "task_incremental", "fm"))
        weight = (
            row["weight"] if isinstance(row["weight"], str) else "" if row["weight"] is None else f"{row['weight']:g}"
        )
        rate = f"{row['rate']:g}" if len(arm.rates) > 1 else ""
        gain = "" if name == "seq" else paired_gain(aa, plain)
        title = f"`{name}`" if name == arm.method else name
        lines.append([title, weight, rate, spread(aa), gain, spread(within), spread(forgetting), *published(arm.paper)])
    header = ["arm", "weight", "rate", "AA", "over `seq`", "task-incremental AA", "FM", "paper's AA", "paper's FM"]
    return markdown_table(header, lines, numbers=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/paper-regime"), help="folder of the runs")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    found = {name: measure(ARMS[name], options.out) for name in options.arms}
    path = PAGE.with_suffix(".json")
    write_json(path, {"machine": machine(), "found": read_json(path).get("found", {}) | found})
    write_table(PAGE, table(read_json(path)["found"]))


if __name__ == "__main__":
    main()
