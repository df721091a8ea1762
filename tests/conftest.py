"""One thread per test process: xdist runs as many processes as there are cores."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _determinism():
    torch.manual_seed(0)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
