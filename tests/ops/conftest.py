"""Backends and instruction sets to test: all that this machine has, the reference alone where nothing was built."""

import os
from collections.abc import Iterator

import pytest

from infssm.ops.backend import NATIVE

# Where one instruction set is asked for, the others have their turn in another run.
_ISAS = [] if NATIVE is None else [os.environ["INFSSM_ISA"]] if "INFSSM_ISA" in os.environ else NATIVE.isas()
VARIANTS = ["reference", *(f"cpu-{isa}" for isa in _ISAS)]


@pytest.fixture(params=VARIANTS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name to pass as `backend`, with the compiled module switched to one instruction set."""
    name, _, isa = request.param.partition("-")
    if not isa:
        yield name
        return
    before = NATIVE.isa()
    NATIVE.use_isa(isa)
    yield name
    NATIVE.use_isa(before)
