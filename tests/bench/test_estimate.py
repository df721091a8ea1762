"""What a run would cost."""

from pathlib import Path

import pytest
import torch

from infssm.bench import timing as _estimate
from infssm.bench.timing import estimate
from infssm.learner.config.load import load_config
from infssm.learner.setup import build
from tests.learner import sequences

CONFIG = {
    "data": {"name": "digits", "num_tasks": 2, "train_per_class": 8, "test_per_class": 4},
    "model": {"name": "vim_nano", "options": {"patch_size": 4, "embed_dim": 16, "depth": 1, "d_state": 4}},
    "train": {"epochs": 3, "task0_epochs": 2, "batch_size": 8},
}


@pytest.mark.parametrize("method", ["seq", "ewc", "inf-ssm-exact", "lucir", "x-der", "l2p-r", "clfd"])
def test_steps_sizes_and_parameters_are_exact(method):
    config = load_config({**CONFIG, "method": method})
    found = estimate(config)
    module = build(config, torch.device("cpu")).method.module
    assert [task[0] for task in found.tasks] == [5, 5]
    assert [task[1] for task in found.tasks] == [40, 40]
    assert [task[-1] for task in found.tasks] == [2 * 5, 3 * 5]
    assert found.steps == 25
    assert found.parameters == sum(p.numel() for p in module.parameters())
    assert found.memory > 16 * found.parameters
    assert found.seconds > 0
    assert "25 steps" in str(found)


def test_memory_grows_with_the_batch():
    small, large = (estimate(load_config(CONFIG, [f"train.batch_size={b}"])).memory for b in (4, 40))
    assert large > 2 * small


def test_more_memory_than_there_is_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate(load_config(CONFIG))
    assert "this machine has" not in str(found)
    monkeypatch.setattr(_estimate, "memory_here", lambda: found.memory - 1)
    assert "lower train.batch_size" in str(found)
    monkeypatch.setattr(_estimate, "memory_here", lambda: None)
    assert "this machine has" not in str(found)


_CLASSES, _WIDTH = 10, 16
_PER_MODEL = 8 * _CLASSES * (1 + _WIDTH + _WIDTH * (_WIDTH + 1) // 2)
"""Bytes of a count, a mean and a triangle of the covariance for every class, in float64."""


@pytest.mark.parametrize(
    ("head", "options", "expected"),
    [
        ("linear", {}, 0),
        ("ncm", {}, _PER_MODEL),
        ("lda", {}, _PER_MODEL),
        ("gda", {}, _PER_MODEL),
        ("lda", {"first_model": True}, 2 * _PER_MODEL),  # of the features of both models, not the first model itself
        ("ranpac", {"width": 32}, _PER_MODEL + 2 * 8 * (32 * 32 + 32 * _CLASSES)),  # sums to fit and to choose by
    ],
)
def test_memory_of_the_heads_statistics_is_stated(head: str, options: dict[str, int], expected: int) -> None:
    found = estimate(load_config({**CONFIG, "method": {"name": f"seq+{head}", **options}}))
    assert found.statistics == expected
    assert (f"of class statistics that {head} keeps" in str(found)) == (expected > 0)


def test_what_self_replay_generates_is_stated(tmp_path: Path) -> None:
    options = {"sequences": 6, "replay_batch": 2, "length": 8}
    found = estimate(sequences.config(f"text:{sequences.text_folder(tmp_path)}", tmp_path, "self-replay", options))
    assert found.generated[0] == 6 * 8 * (4 + 2 * 256)  # a token's id, and its logits over 256 bytes in float16
    assert "of sequences, and logits on them, that the old model generates for each later task" in str(found)


def test_memory_of_self_replay_counts_what_it_adds_to_a_step_once(tmp_path: Path) -> None:
    """Rows of new text take as much as in plain training, however many generated ones are beside them."""
    text, more = f"text:{sequences.text_folder(tmp_path)}", []
    for name, options in (("seq", {}), ("self-replay", {"sequences": 40, "replay_batch": 16, "length": 16})):
        small, large = (
            estimate(sequences.config(text, tmp_path, name, options, train={"batch_size": size})).memory
            for size in (4, 12)
        )
        more.append(large - small)
    assert more[1] < 1.5 * more[0]  # generated rows keep a little more than new ones: two models' probabilities
    few, many = (
        estimate(sequences.config(text, tmp_path, "self-replay", {"sequences": count, "length": 16, "replay_batch": 2}))
        for count in (4, 400)
    )
    assert many.memory - few.memory == 396 * 16 * (4 + 2 * 256)


@pytest.mark.parametrize(("name", "copies"), [("seq", 4), ("lwf", 5), ("inf-ssm-exact", 5)])
def test_memory_of_the_old_model_is_counted(
    name: str, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_estimate, "_time_step", lambda *_: (0.0, 0))
    found = estimate(sequences.config(f"text:{sequences.text_folder(tmp_path)}", tmp_path, name))
    assert found.memory == 4 * copies * found.parameters
