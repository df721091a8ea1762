"""Heads of two processes that share a task's images are the head of one process that has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from infssm.methods import Batch, attach, list_methods, parse_name
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS

WORLD = 2
FITTED = [name for name in list_methods() if parse_name(name).head.fitted]


def options(name: str) -> list[dict[str, Any]]:
    found = parse_name(name).head.Config.model_fields
    small = {"samples": 4} if "samples" in found else {}
    looks = {"mean_token": True, "token_spread": True, "blocks": [1, 2], "mirror": True, "first_model": True}
    drifts = [{"drift": drift} for drift in ("map", "mean", "none")] if "drift" in found else [{}]
    return [{**small, **one} for one in (*drifts, looks)]


def scores(rank: int, world: int) -> dict[str, Tensor]:
    """Logits after two tasks between which the model moved, for every head and drift."""
    x = toys.batch(TASKS[0], 6, seed=9).x
    found = {}
    for name in FITTED:
        for chosen in options(name):
            torch.manual_seed(0)
            method = attach(toys.vim(), name, num_classes=CLASSES, **chosen)
            for task in TASKS[:2]:
                method.begin_task(task)
                # Rows are dealt in turn, as the loop's loaders deal them; 15 images, so that shares are unequal.
                rows = toys.batch(task, 15, seed=task.index)
                method.end_task(task, [Batch(rows.x[rank::world], rows.y[rank::world])])
                toys.nudge(method.module)
            method.begin_task(TASKS[2])
            method.end_task(TASKS[2], [Batch(rows.x[rank::world], rows.y[rank::world] + 2)])
            method.module.eval()
            with torch.no_grad():
                found[f"{name} {chosen}"] = method.module(x)
    return found


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    torch.save(scores(rank, WORLD), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_fit_what_one_fits(tmp_path: Path) -> None:
    mp.start_processes(process, (str(tmp_path),), nprocs=WORLD, start_method="spawn")
    expected = scores(0, 1)
    assert len(expected) > len(FITTED)
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, one in expected.items():
            assert one.isfinite().all(), name
            torch.testing.assert_close(found[name], one, rtol=1e-6, atol=1e-6 * float(one.abs().max()), msg=name)
