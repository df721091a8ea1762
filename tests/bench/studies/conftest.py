"""One small run for all studies: five tasks of digits, a Vim of two small layers."""

import pytest

from infssm.bench.running import run
from infssm.learner.config.load import load_config

CONFIG = {
    "data": {"name": "digits", "num_tasks": 5, "train_per_class": 40, "test_per_class": 20},
    "model": {"name": "vim_nano", "options": {"patch_size": 4, "embed_dim": 32, "depth": 2, "d_state": 8}},
    "method": {"name": "seq"},
    "train": {"epochs": 2, "task0_epochs": 12, "batch_size": 16, "lr": 2e-3, "threads": 1},
}


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    return run(load_config({**CONFIG, "out": str(tmp_path_factory.mktemp("studies"))}), quiet=True).path
