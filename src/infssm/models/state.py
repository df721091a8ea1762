"""What a causal model remembers between chunks of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor


class LayerState(NamedTuple):
    """What one layer remembers of the tokens before.

    hidden: [batch, channels, n], complex for S4D. tail: [batch, width - 1, channels], the last inputs of the causal
    convolution in front of the scan; None where there is none.
    """

    hidden: Tensor
    tail: Tensor | None = None


@dataclass(frozen=True)
class SequenceState:
    """What a causal model remembers of the tokens before; its size does not depend on their number.

    Attributes:
        layers: the state of each layer, from the input to the output.
        total: [batch, dim], float64, the sum of the features of all tokens so far; None where the model does not take
            their mean. In float32 the mean of a million tokens would lose half of its digits.
        tokens: how many tokens were read.
    """

    layers: tuple[LayerState, ...]
    total: Tensor | None = None
    tokens: int = 0

    def detach(self) -> SequenceState:
        """The same values without their history, which ends back-propagation through time here."""
        layers = tuple(LayerState(layer.hidden.detach(), _detached(layer.tail)) for layer in self.layers)
        return replace(self, layers=layers, total=_detached(self.total))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the state."""
        for layer in self.layers:
            yield from (part for part in layer if part is not None)
        if self.total is not None:
            yield self.total

    @property
    def nbytes(self) -> int:
        """Memory that the state keeps alive."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
