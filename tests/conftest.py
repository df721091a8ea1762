"""One thread per test process, and the same generated examples in every run.

One thread, because sums that threads share are rounded in another order on every machine (and xdist runs as many
processes as there are cores).

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
    torch.set_num_threads(1)
