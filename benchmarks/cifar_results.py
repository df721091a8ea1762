"""docs/results/replay.md: replay, prompt and frequency methods on a part of CIFAR-100, with Inf-SSM on each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.digits_results import machine, spread
from benchmarks.results import SEEDS, Bench

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "seq": ("seq", {}),
    "inf-ssm-exact": ("inf-ssm-exact", {}),
    **{f"er, mask {mask}": ("er", {"mask": mask}) for mask in ("full", "seen", "current+seen")},
    "er+inf-ssm-exact": ("er+inf-ssm-exact", {}),
    **{
        f"{m}{plus}": (f"{m}{plus}", {}) for m in ("lucir", "x-der", "l2p-r", "clfd") for plus in ("", "+inf-ssm-exact")
    },
}


def base(data_root: str | None) -> Mapping[str, Any]:
    part = _half_of_each_task(Path(data_root or ".").expanduser().resolve())
    return {
        "benchmark": "cifar50-5",
        "data": {"name": str(part), "num_tasks": 5, "train_per_class": 100, "test_per_class": 50},
        "model": {"name": "vim_nano", "options": {"patch_size": 8, "embed_dim": 64, "depth": 4}},
        "train": {"epochs": 5, "task0_epochs": 10, "batch_size": 32, "lr": 1e-3, "weight_decay": 0.05},
    }


def _half_of_each_task(root: Path) -> Path:
    """The first ten of each twenty classes of CIFAR-100, as an ``.npz`` beside ``cifar100.npz``."""
    part = root / "cifar50.npz"
    if part.exists():
        return part
    arrays = np.load(root / "cifar100.npz")
    kept = [c for c in range(100) if c % 20 < 10]
    label = np.full(100, -1)
    label[kept] = np.arange(50)
    found = {"classes": arrays["classes"][kept]}
    for half in ("train", "test"):
        mask = label[arrays[f"y_{half}"]] >= 0
        found |= {f"x_{half}": arrays[f"x_{half}"][mask], f"y_{half}": label[arrays[f"y_{half}"][mask]]}
    np.savez(part, **found)
    return part


def write(bench: Bench, folder: Path) -> None:
    bench.go([("seq", {}, seed) for seed in SEEDS])
    runs = [(method, options, seed) for method, options in METHODS.values() for seed in SEEDS]
    outcomes = bench.go(runs)
    rows = {label: outcomes[3 * i : 3 * i + 3] for i, label in enumerate(METHODS)}
    lines = ["| method | AA | AIA | FM | task-inc. AA | s per run |", "|---|---|---|---|---|---|"]
    for label, found in rows.items():
        cells = " | ".join(spread([getattr(o, k) for o in found]) for k in ("aa", "aia", "fm", "ti"))
        lines.append(f"| {label} | {cells} | {sum(o.seconds for o in found) / 3:.0f} |")
    (folder / "replay.md").write_text("# Replay\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    data = {"environment": machine(), "rows": {k: [o._asdict() for o in v] for k, v in rows.items()}}
    (folder / "replay.json").write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
