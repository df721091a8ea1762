"""Two processes of one run hold the same buffers and replay different parts of the same draw."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from infssm._processes import gather_in_graph, gather_rows, process_slice, sum_over_processes
from infssm.methods.bases.er import ER
from infssm.methods.replay.buffers import ReservoirBuffer
from tests.compare import identical
from tests.methods import toys
from tests.methods.replaying import build, optimizer_of
from tests.methods.toys import TASKS

WORLD = 2


def _start(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)


def _work(rank: int, folder: str) -> None:
    _start(rank, folder)
    torch.save(
        _exchange(rank)
        | _compared(rank)
        | _shares()
        | _reservoir(rank)
        | _method("x-der", rank)
        | _method("clfd", rank),
        _out(folder, rank),
    )
    dist.barrier()
    os._exit(0)  # gloo's threads can abort a process that ends in the ordinary way while its peer closes connections


def _out(folder: str, rank: int) -> str:
    return f"{folder}/{rank}.pt"


def _exchange(rank: int) -> dict[str, torch.Tensor]:
    rows = torch.full((rank + 1, 2), float(rank))
    return {
        "gathered": gather_rows(rows),
        "sum": sum_over_processes([rows[0]])[0],
        "mine": process_slice(torch.arange(5)),
    }


ROWS = torch.linspace(-1, 1, 6).view(3, 2).double()


def _energy(rows: torch.Tensor) -> torch.Tensor:
    """A loss in which every row meets every other."""
    return (rows @ rows.T).exp().mean()


def _compared(rank: int) -> dict[str, torch.Tensor]:
    rows = (ROWS[:1], ROWS[1:])[rank].clone().requires_grad_()
    _energy(gather_in_graph(rows)).backward()
    return {"gradient": gather_rows(rows.grad) / WORLD}


def _shares() -> dict[str, torch.Tensor]:
    """Slots per process of more than are stored, an odd number, one; whether one entry can be replayed, and seven."""
    method = build("er")
    base = method.base
    assert isinstance(base, ER)
    replays = []
    for count in (1, 7):
        rows = {"image": torch.zeros(count, 1, 8, 8, dtype=torch.uint8), "label": torch.arange(count)}
        base.buffer.write(torch.arange(count), rows)
        replays.append(base.replays)
    return {"shares": torch.tensor([len(base.draw(count)) for count in (20, 5, 1)] + replays)}


def _reservoir(rank: int) -> dict[str, torch.Tensor]:
    buffer = ReservoirBuffer(6, ("image", "label"), seed=4)
    for start in range(0, 24, 4):
        label = torch.arange(start + 2 * rank, start + 2 * rank + 2)
        buffer.offer(image=label.to(torch.uint8).view(-1, 1, 1, 1), label=label)
    drawn = buffer.sample(4)
    noise = torch.rand(3, generator=buffer.fresh_generator())
    return {"labels": buffer["label"].clone(), "drawn": drawn, "share": process_slice(drawn), "noise": noise}


def _method(name: str, rank: int) -> dict[str, torch.Tensor]:
    method = build(name)
    for task in TASKS[:2]:
        batches = [_half(batch, rank) for batch in toys.loader(task)]
        method.begin_task(task, batches)
        optimizer = optimizer_of(method)
        method.begin_epoch(0, 1)
        for batch in batches:
            optimizer.zero_grad()
            toys.total(method.loss(batch)).backward()
            _average_gradients(method.module)
            optimizer.step()
            method.after_step()
        method.end_epoch(0, 1)
        method.end_task(task, batches)
    data = method.base.buffer.state_dict()["data"]
    weights = torch.cat([p.detach().flatten() for p in method.module.parameters()])
    return {f"{name} {field}": values for field, values in data.items()} | {f"{name} weights": weights}


def _half(batch: toys.Batch, rank: int) -> toys.Batch:
    x, y, raw = (part.tensor_split(WORLD)[rank] for part in (batch.x, batch.y, batch.raw))
    return toys.Batch(x, y, raw=raw)


def _average_gradients(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD


@pytest.fixture(scope="module")
def results() -> list[dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_work, args=(folder,), nprocs=WORLD, start_method="spawn")
        return [torch.load(Path(_out(folder, rank))) for rank in range(WORLD)]


def test_rows_are_exchanged(results: list[dict[str, torch.Tensor]]):
    for result in results:
        assert result["gathered"].tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        assert result["sum"].tolist() == [1.0, 1.0]
    assert [r["mine"].tolist() for r in results] == [[0, 1, 2], [3, 4]]


def test_losses_that_compare_rows_have_the_gradient_of_one_process(results: list[dict[str, torch.Tensor]]):
    rows = ROWS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(_energy(rows), rows)
    for result in results:
        torch.testing.assert_close(result["gradient"], expected)


def test_processes_replay_equally_many_images(results: list[dict[str, torch.Tensor]]):
    assert [r["shares"].tolist() for r in results] == [[3, 2, 1, 0, 1]] * WORLD


def test_buffers_and_draws_agree_and_shares_do_not_overlap(results: list[dict[str, torch.Tensor]]):
    one, other = results
    alone = ReservoirBuffer(6, ("image", "label"), seed=4)
    for start in range(0, 24, 4):
        label = torch.arange(start, start + 4)
        alone.offer(image=label.to(torch.uint8).view(-1, 1, 1, 1), label=label)
    assert identical(one["labels"], other["labels"])
    assert identical(one["labels"], alone["label"])
    assert identical(one["drawn"], other["drawn"])
    assert identical(torch.cat((one["share"], other["share"])), one["drawn"])
    assert not identical(one["noise"], other["noise"])


@pytest.mark.parametrize("name", ["x-der", "clfd"])
def test_methods_keep_buffers_and_weights_alike(results: list[dict[str, torch.Tensor]], name: str):
    one, other = results
    keys = [key for key in one if key.startswith(f"{name} ")]
    assert len(keys) >= 3
    for key in keys:
        assert identical(one[key], other[key]), key
