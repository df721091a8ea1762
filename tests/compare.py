"""How tests compare numbers, so that they hold on any CPU.

Two code paths that compute the same thing agree to rounding, and how many bits that is depends on the processor: which
instructions it has, in which order its libraries add up, whether a product and a sum are rounded once or twice. Only a
tensor that was copied, picked or moved, or that the very same code computed twice from the same inputs, is equal bit by
bit. `identical` says that a test means the latter; everything else is compared by `assert_rounding` or a wider bound.
"""

from torch import Tensor, equal, finfo
from torch.testing import assert_close


def identical(one: Tensor, other: Tensor) -> bool:
    """Equal bit by bit: a copy or a choice of elements, or the very same code run twice on the same inputs."""
    return equal(one, other)


def assert_rounding(actual: Tensor, expected: Tensor, *, terms: int = 256) -> None:
    """Two ways to the same value: they differ by the rounding of sums of up to `terms` terms of the largest size.

    The error of such a sum is at most `terms * eps` of the largest term, whichever order it is taken in; the size of
    the terms is taken to be that of the largest element (and 1, for results that nearly cancel).
    """
    scale = max(float(expected.detach().abs().max()), 1.0) if expected.numel() else 1.0
    assert_close(actual, expected, rtol=0, atol=terms * finfo(expected.dtype).eps * scale)
