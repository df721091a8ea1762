"""One run on two machines: two torchrun agents that meet on loopback, one process each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from infssm.bench import running
from infssm.bench.running import run
from infssm.errors import ConfigError, InfssmError
from infssm.learner.config.load import to_yaml
from infssm.learner.devices import launch
from infssm.learner.result import Result
from infssm.learner.setup import build
from infssm.learner.store.directory import RunDirectory, find_runs
from tests.learner.tiny import final_weights, tiny_config

ROOT = Path(__file__).resolve().parents[2]
NODES = 2
PATIENCE = 600
"""Seconds after which the nodes count as hung: some forty times what they need."""
BOUND = 1e-2
"""Difference between the weights that two processes and one process end with, relative to the way they went.

Gradients agree to 1e-5 of their norm (test_devices.py); Adam divides each by its own size, which magnifies rounding
where a gradient is all but zero. Measured: 1e-6; a batch that is shared wrongly gives 1e-1 and more.
"""


class Node(NamedTuple):
    code: int
    said: str


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def two_nodes(folder: Path, config: Path, *, killed_in: int) -> list[Node]:
    """Run a configuration; the process of the second node is killed once, in the given step."""
    (folder / "notes").mkdir()
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two-nodes"]
    agent += [*meeting, "--local-addr", "127.0.0.1", "--max-restarts", "1"]
    worker = ["-m", "tests.learner.elastic", str(config), str(folder / "notes"), str(killed_in)]
    logs = [folder / f"node{node}.log" for node in range(NODES)]
    agents = [_started([*agent, *worker], log) for log in logs]
    try:
        codes = [process.wait(PATIENCE) for process in agents]
    finally:
        for process in agents:
            process.kill()
            process.wait()
    return [Node(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


def _started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as said:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)


def test_two_nodes_train_what_one_process_trains_and_survive_a_killed_worker(tmp_path: Path) -> None:
    own = {"train": {"task0": "own"}}  # all steps are the run's, so that step 8 is in its second task
    alone = run(tiny_config(tmp_path / "alone", "lwf-ac", **own), quiet=True)
    config = tmp_path / "tiny.yaml"
    config.write_text(to_yaml(tiny_config(tmp_path / "shared", "lwf-ac", **own)))
    nodes = two_nodes(tmp_path, config, killed_in=8)
    assert [node.code for node in nodes] == [0, 0], "\n".join(node.said for node in nodes)
    assert any("another process of this run died" in node.said for node in nodes)
    lives = {note.name: note.read_text() for note in (tmp_path / "notes").iterdir()}
    assert lives["rank1-life0"] == "0 of 2"
    assert lives["rank1-life1"] == "6 of 2", "the second life goes on from the checkpoint of the first"
    [together] = [Result.load(found.path) for found in find_runs([tmp_path / "shared"])]
    assert_close(together, alone)


def assert_close(found: Result, expected: Result) -> None:
    """The same accuracies but for an image on the edge, and weights within the bound."""
    begin = build(expected.config, torch.device("cpu")).method.weights()
    a, b = final_weights(found), final_weights(expected)
    assert a.keys() == b.keys()

    def size(one: dict[str, Any], other: dict[str, Any]) -> float:
        return float(sum((one[k].double() - other[k].double()).square().sum() for k in one)) ** 0.5

    assert size(a, b) <= BOUND * size(b, dict(begin))
    images = 20  # per task: 5 classes, 4 each
    assert torch.tensor(found.matrix.values - expected.matrix.values).nan_to_num().abs().max() <= 1 / images + 1e-9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "3"}, "3 processes on 2 machines, 2 of them here: start equally many"),
        ({"TORCHELASTIC_MAX_RESTARTS": "1"}, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_what_torchrun_cannot_do_is_refused(
    changes: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    for name, value in {**world, "TORCHELASTIC_USE_AGENT_STORE": "True", **changes}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        run(tiny_config(tmp_path), quiet=True)


def test_machines_without_a_shared_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_PATIENCE", 0.0)
    seen = RunDirectory(tmp_path / "seen")
    seen.make()
    here, there = (fabric_of_two(other_sees=sees) for sees in (True, False))
    running._check_shared(here, seen)
    for fabric, folder in ((there, seen), (here, RunDirectory(tmp_path / "elsewhere"))):
        with pytest.raises(ConfigError, match=r"1 of the 2 processes do not see .* shared file system"):
            running._check_shared(fabric, folder)


def fabric_of_two(*, other_sees: bool) -> Any:
    """What one of two processes has: a sum with what the other one says."""
    device = torch.device("cpu")
    return SimpleNamespace(world_size=2, device=device, all_reduce=lambda mine, **_: mine + float(other_sees))


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    with pytest.raises(RuntimeError, match="reset") as caught:
        launch(tiny_config(tmp_path).train, fails)
    assert not isinstance(caught.value, InfssmError)
