"""Backends and instruction sets to test: all that this machine has, the reference alone where nothing was built."""

from collections.abc import Iterator

import pytest

from infssm.kernels.backend import NATIVE

VARIANTS = ["reference"] if NATIVE is None else ["reference", *(f"cpu-{isa}" for isa in NATIVE.isas())]


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
