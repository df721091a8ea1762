"""What a plain loop gives."""

import pytest
from torch import Tensor

from tests.integrations.loops import plain_loop


@pytest.fixture(scope="package")
def expected() -> dict[str, Tensor]:
    return plain_loop()
