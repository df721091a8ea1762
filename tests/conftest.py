"""One thread per test process (xdist runs as many as there are cores), and the same generated examples in every run.

`HYPOTHESIS_PROFILE=fresh pytest` draws new examples.
"""

import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import settings

# Without a GPU, Triton's kernels run in its interpreter, which it has to know before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("gate", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache():
    """What infssm remembers between runs goes to a folder of the tests, not to the home of who runs them."""
    folder = os.environ["INFSSM_CACHE"] = tempfile.mkdtemp(prefix="infssm-cache-")
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _determinism():
    torch.manual_seed(0)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
