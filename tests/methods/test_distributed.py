"""Two processes that share each batch end with the statistics of one process that sees all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from infssm.methods import Batch, build_method
from tests.methods import toys
from tests.methods.toys import TASKS

WORLD = 2
NAME = "ewc+mas+si+ucl+inf-ssm-exact"


def share(batch: Batch, rank: int, world: int) -> Batch:
    return Batch(batch.x[rank::world], batch.y[rank::world])


def statistics(rank: int, world: int) -> dict[str, Any]:
    """Two tasks of plain SGD with averaged gradients; what the methods know afterwards."""
    model = toys.vim()
    method = build_method(model, NAME, **{"inf-ssm-exact.measure_at": 2})
    terms: dict[str, Tensor] = {}
    for task in TASKS[:2]:
        batches = toys.loader(task)
        method.begin_task(task)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for batch in batches:
            mine = share(batch, rank, world)
            model.eval()  # no sampling: processes draw different weights
            terms = method.loss(mine)
            toys.total(terms).backward()
            average(model, world)
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()
        method.end_task(task, [share(batch, rank, world) for batch in batches])
    return {"state": method.state_dict()["components"], "ucl": {k: v.detach() for k, v in terms.items() if "ucl" in k}}


def average(model: torch.nn.Module, world: int) -> None:
    for parameter in model.parameters():
        if world > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    torch.save(statistics(rank, WORLD), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def compare(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            compare(one[key], other[key])
    elif isinstance(one, (Tensor, float)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-14)
    elif isinstance(one, list):
        assert len(one) == len(other)
    else:
        assert one == other


def test_two_processes_know_what_one_knows(tmp_path: Path) -> None:
    mp.start_processes(process, (str(tmp_path),), nprocs=WORLD, start_method="spawn")
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    expected = statistics(0, 1)
    for one in found:
        compare(one, expected)
    assert float(max(v.abs().max() for v in expected["state"]["si"]["importance"].values())) > 0
    assert expected["state"]["inf-ssm-exact"]["weight"] > 0
