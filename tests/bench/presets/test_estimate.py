"""What a run would cost."""

from pathlib import Path

import pytest
import torch

from infssm.bench.presets import estimate
from infssm.bench.presets import estimates as _estimate
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


@pytest.mark.parametrize(
    ("head", "options", "expected"),
    [
        ("linear", {}, 0),
        ("ncm", {}, None),
        ("lda", {}, 8 * (10 + 10 * 16 + 16 * 16 + 10)),
        ("gda", {}, 8 * (10 + 10 * 16 + 16 * 16 + 10) + 4 * 10 * 16 * 16),
        ("lda", {"first_model": True}, 8 * (2 * (10 + 10 * 16 + 16 * 16) + 10)),  # of both models, not the model itself
        ("ranpac", {"width": 32}, 8 * (32 * 32 + 32 * 10 + 17)),
    ],
)
def test_memory_of_the_heads_statistics_is_stated(head: str, options: dict[str, int], expected: int | None) -> None:
    """10 classes of width 16: counts, means, a covariance, a number each; gda one per class too; Gram, 17 errors."""
    plain = estimate(load_config({**CONFIG, "method": "seq"}))
    found = estimate(load_config({**CONFIG, "method": {"name": f"seq+{head}", **options}}))
    if expected is None:
        assert 0 < found.statistics <= 8 * (10 + 10 * 16 + 16 * 16)
    else:
        assert found.statistics == expected
    assert ("class statistics" in str(found)) == (found.statistics > 0)
    assert f"that {head} keeps" in str(found) or not found.statistics
    assert plain.statistics == 0


def test_what_self_replay_generates_is_stated(tmp_path: Path) -> None:
    options = {"sequences": 6, "replay_batch": 2, "length": 8}
    found = estimate(sequences.config(f"text:{sequences.text_folder(tmp_path)}", tmp_path, "self-replay", options))
    assert found.generated[0] == 4 * 6 * 8
    assert "192 bytes of sequences that the old model generates for each later task" in str(found)
