"""Run directories made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from infssm.learner.metrics import AccuracyMatrix, Confusion
from infssm.learner.store.directory import RunDirectory

ROWS = [[0.9], [0.5, 0.8], [0.3, 0.6, 0.7]]
INSIDE = [[0.95], [0.9, 0.85], [0.8, 0.75, 0.9]]


def config(
    method: str, seed: int = 0, *, data: str = "digits", evaluate: str = "test", train: Any = None, **options: Any
) -> dict[str, Any]:
    return {
        "data": {"name": data, "num_tasks": 3, "root": None, "evaluate": evaluate},
        "model": {"name": "vim_nano"},
        "method": {"name": method, **options},
        "train": {"lr": 0.001, "task0": "train", **(train or {})},
        "seed": seed,
        "out": "runs",
    }


def confusion(seen: int = 6) -> Confusion:
    """Ten images a class, of which the class's own number goes to the next one."""
    counts = [[10 - i if j == i else i if j == (i + 1) % seen else 0 for j in range(seen)] for i in range(seen)]
    return Confusion.of(counts, ("zero", "one", "two", "three", "four", "five"), (2, 2, 2))


def fake_run(
    path: Path, method: str = "seq", seed: int = 0, *, shift: float = 0.0, complete: bool = True, **more: Any
) -> RunDirectory:
    run = RunDirectory.create(path)
    run.write_text("config.yaml", yaml.safe_dump(config(method, seed, **more)))
    run.write_json("env.json", {"python": "3.11", "threads": 1, "packages": {"torch": "2.13"}})
    matrix = AccuracyMatrix(3)
    rows = len(ROWS) if complete else 2
    for row, inside in list(zip(ROWS, INSIDE, strict=True))[:rows]:
        matrix.update([v + shift for v in row], inside, samples=[10] * len(row))
    run.write_text("accuracy_matrix.csv", matrix.to_csv())
    run.write_json("confusion.json", confusion(2 * rows).to_json())
    lines: list[dict[str, Any]] = []
    for epoch in range(4):
        lines.append({"kind": "step", "at": epoch + 1, "task": 0, "epoch": epoch, "step": 1, "lr": 1e-3, "loss": {}})
        loss = {"ce": 1.0 / (epoch + 1)} | ({"reg/<b>": 1e-3} if epoch > 1 else {})
        lines.append({"kind": "epoch", "at": epoch + 1, "task": 0, "epoch": epoch, "loss": loss, "images_per_s": 200.0})
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if complete:
        run.write_json("result.json", {"aa": matrix.aa, "seconds": 1.0})
    return run
