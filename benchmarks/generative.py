"""`python -m benchmarks.generative`: a Mamba that generates what it classifies, and rehearses it.

A sample is 64 tokens in the class's own alphabet, after a token that starts the class. The model is trained to predict
the next token; it classifies by Bayes' rule: the class under which it finds the sample most probable. Before a new task
it generates samples of every class it knows and, while it learns the task, keeps its predictions on them. No sample and
no statistic is stored. Writes `docs/results/generative.json` and the table of `docs/results/generative.md`; runs that
the JSON file holds are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import infssm
from benchmarks.pages import RESULTS, machine, markdown_table, read_json, spread, write_json, write_table
from infssm._seeding import seed_all
from infssm.bench.presets import load_preset
from infssm.data import ArrayImages, Spectra, TaskData, TaskStream
from infssm.learner.config.load import load_config, merge
from infssm.learner.metrics.accuracies import Accuracies
from infssm.learner.setup import load_stream
from infssm.models.generate import generate

PRESETS = {"digits": "digits/5-task/seq", "speech": "speech-digits/classes/seq"}
SEEDS = (0, 10, 100)
LEVELS, CLASSES, SIDE = 17, 10, 8
"""Grey values or energies, classes, and the rows and columns of a sample."""
STARTS = LEVELS * CLASSES
"""The first of the tokens that start a class; the classes' alphabets are before it."""
RAW = "Gaussian classes on raw values"
PAGE = RESULTS / "generative.md"


@dataclass(frozen=True)
class Arm:
    """One way to learn the stream.

    Attributes:
        replay: weight of the loss on generated samples; 0 generates none.
        own_alphabet: whether every class has tokens of its own, or all share one alphabet after the class's start.
        joint: whether to train once, on the samples of all tasks.
        steps: optimizer steps per task.
    """

    replay: float = 1.0
    own_alphabet: bool = True
    joint: bool = False
    steps: int = 105
    rate: float = 6e-3
    batch: int = 32
    generated: int = 100


ARMS = {
    "generative replay": Arm(),
    "one alphabet for all classes": Arm(own_alphabet=False),
    "without replay": Arm(replay=0),
    "joint training": Arm(joint=True, steps=290),
}


def levels(part: TaskData) -> Tensor:
    """Samples as int64 [n, 64] from 0 to 16: grey values, or energies of eight bands in eight parts of the sound."""
    samples = part.dataset.samples
    if isinstance(samples, Spectra):
        # Every sound is stretched to the same length. Log energies run from 0 to about 2; the scale is the same for all
        # classes, because it has to be known before the first one.
        spectra = [F.adaptive_avg_pool2d(samples.sequence(int(i))[None], SIDE)[0] for i in part.indices]
        return (8 * torch.stack(spectra)).round().long().clamp(0, LEVELS - 1).flatten(1)
    assert isinstance(samples, ArrayImages)
    pixels = samples.pixels[torch.from_numpy(part.indices), 0]
    return (pixels.flatten(1) * ((LEVELS - 1) / 255)).round().long()


def tokens(values: Tensor, labels: Tensor, arm: Arm) -> Tensor:
    """The sequences of samples ``[n, 64]`` as members of the classes ``[n]``: int64 [n, 65]."""
    alphabet = labels[:, None] * LEVELS if arm.own_alphabet else 0
    return torch.cat((STARTS + labels[:, None], alphabet + values), dim=1)


def make_model() -> nn.Module:
    """A Mamba of width 96 with three layers, from scratch."""
    model: nn.Module = infssm.create_model("mamba_lm_nano", d_model=96, n_layer=3, vocab_size=STARTS + CLASSES)
    return model


@torch.no_grad()
def log_likelihoods(model: nn.Module, values: Tensor, known: int, arm: Arm) -> Tensor:
    """Log probability of samples ``[n, 64]`` under every known class: [n, known]."""
    columns = []
    for label in range(known):
        sequence = tokens(values, torch.full((len(values),), label), arm)
        found = model(sequence[:, :-1]).log_softmax(-1).gather(-1, sequence[:, 1:, None])
        columns.append(found.sum(dim=(1, 2)))
    return torch.stack(columns, dim=1)


@torch.no_grad()
def rehearsal(old: nn.Module, known: int, arm: Arm) -> tuple[Tensor, Tensor]:
    """Sequences that the old model generates, [known, generated, 65], and its predictions of all tokens but the first.

    Every class is generated equally often, because its start is given.
    """
    start = STARTS + torch.arange(known).repeat_interleave(arm.generated)
    sequences = generate(old, start[:, None], SIDE * SIDE)
    predictions = torch.cat([old(part[:, :-1]).softmax(-1) for part in sequences.split(200)])
    shape = (known, arm.generated)
    return sequences.unflatten(0, shape), predictions.unflatten(0, shape)


def learn(model: nn.Module, values: Tensor, labels: Tensor, known: int, arm: Arm) -> None:
    """Train on the samples of a task, and rehearse the ``known`` classes of the tasks before it."""
    rehearse = known > 0 and arm.replay > 0
    if rehearse:
        sequences, predictions = rehearsal(copy.deepcopy(model).eval(), known, arm)
    optimizer = torch.optim.AdamW(model.parameters(), arm.rate, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arm.rate, arm.steps, pct_start=0.1)
    order = torch.empty(0, dtype=torch.long)
    model.train()
    for _ in range(arm.steps):
        if len(order) < arm.batch:
            order = torch.randperm(len(values))
        rows, order = order[: arm.batch], order[arm.batch :]
        batch = tokens(values[rows], labels[rows], arm)
        if rehearse:
            of = torch.arange(arm.batch) % known, torch.randint(arm.generated, (arm.batch,))
            batch = torch.cat((batch, sequences[of]))
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits[: arm.batch].flatten(0, 1), batch[: arm.batch, 1:].flatten())
        if rehearse:
            # Cross-entropy with soft targets: KL(old || new) up to a constant.
            replayed = logits[arm.batch :].log_softmax(-1)
            loss = loss - arm.replay * (predictions[of] * replayed).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def outcome(stream: TaskStream, seed: int, arm: Arm, part: str) -> dict[str, Any]:
    """Accuracies in percent after every task, what follows from them, and seconds of training and generating."""
    seed_all(seed)
    model, seconds = make_model(), 0.0
    tasks = list(stream)
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    train = [(levels(task.train), task.train.labels) for task in tasks]
    for task in tasks:
        if arm.joint and task.index < len(tasks) - 1:
            continue
        values, labels = train[task.index]
        if arm.joint:
            values, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
        began = time.perf_counter()
        learn(model, values, labels, 0 if arm.joint else task.classes.start, arm)
        seconds += time.perf_counter() - began
        for seen in tasks[: task.index + 1]:
            asked: TaskData = getattr(seen, part)
            found = log_likelihoods(model, levels(asked), task.classes.stop, arm).argmax(1)
            matrix[task.index, seen.index] = 100 * float((found == asked.labels).float().mean())
    rows = [[round(value, 2) for value in row if value == value] for row in matrix.tolist()]  # JSON has no NaN
    accuracies = Accuracies(matrix, np.array([len(task.test) for task in tasks], dtype=np.float64))
    result = {"aa": accuracies.aa, "seconds": seconds, "matrix": rows}
    if not arm.joint:
        result |= {"fm": accuracies.fm(), "new": float(matrix.diagonal().mean())}
    return result


def raw_statistics(stream: TaskStream, part: str) -> dict[str, Any]:
    """AA in percent of Gaussian classes fitted to the values: what stored statistics reach without a model."""
    classes = [levels(task.train)[task.train.labels == label].double() for task in stream for label in task.classes]
    own = torch.stack([torch.cov(values.T) for values in classes])
    covariances = 0.9 * own + 0.1 * own.mean(0)
    scale = covariances.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    covariances = covariances + 0.1 * scale * torch.eye(SIDE * SIDE)
    normal = torch.distributions.MultivariateNormal(torch.stack([v.mean(0) for v in classes]), covariances)
    asked: list[TaskData] = [getattr(task, part) for task in stream]
    found = [normal.log_prob(levels(data).double()[:, None]).argmax(1) for data in asked]
    right = [float((f == data.labels).float().mean()) for f, data in zip(found, asked, strict=True)]
    return {"aa": 100 * statistics.mean(right)}


def table(stored: dict[str, Any]) -> list[str]:
    """One line per stream and arm, of test samples."""
    rows = []
    for stream in PRESETS:
        for name in (*ARMS, RAW):
            runs = list(stored.get(f"{stream}, {name}, test", {}).values())
            if runs:
                aa, fm, new = (spread([run[key] for run in runs if key in run]) for key in ("aa", "fm", "new"))
                rows.append([stream, name, aa, ", ".join(f"{run['aa']:.1f}" for run in runs), fm, new])
    return markdown_table(["stream", "arm", "AA", "seeds", "FM", "new task"], rows)


def measure(streams: Sequence[str], arms: Sequence[str], seeds: Sequence[int], part: str, root: Path | None) -> None:
    """Run what the JSON file does not hold, and write it and the page's table after every run."""
    path = PAGE.with_suffix(".json")
    stored = read_json(path)
    for name in streams:
        for arm in (*arms, RAW):
            for seed in seeds[:1] if arm == RAW else seeds:
                runs = stored.setdefault(f"{name}, {arm}, {part}", {})
                if str(seed) in runs:
                    continue
                own = {"seed": seed} | ({"data": {"root": str(root)}} if root else {})
                stream = load_stream(load_config(merge(load_preset(PRESETS[name]).values, own)))
                runs[str(seed)] = raw_statistics(stream, part) if arm == RAW else outcome(stream, seed, ARMS[arm], part)
                print(name, arm, part, seed, runs[str(seed)], flush=True)
                stored["machine"] = machine()
                write_json(path, stored)
                write_table(PAGE, table(stored))


def main() -> None:
    """Measure and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", nargs="+", choices=PRESETS, default=["digits"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--part", choices=("val", "test"), default="test")
    parser.add_argument("--data", type=Path, help="folder that holds the recordings (fsdd)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(options.streams, options.arms, options.seeds, options.part, options.data)


if __name__ == "__main__":
    main()
