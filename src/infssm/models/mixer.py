"""Base of the state space mixers of infssm: their scans, recorded states, and memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from infssm.errors import ConfigError
from infssm.ops import ScanInputs, mean_states, scan

StateRows = tuple[Tensor, "slice | None"]
"""A parameter and the rows of it that form states (``None``: all rows)."""

STATE_SETS = ("AC-direct", "ABC-direct", "ABC-full")


class RawStates(NamedTuple):
    """States of one scan direction, one row per token, before any soft normalisation.

    a: [batch, tokens, n] mean over channels of the discretised transition; [..., 1] when the transition is scalar.
    c, b: [batch, tokens, n] output and input vectors as the projections give them.
    delta: [batch, tokens] mean step size. zoh: [batch, tokens, n] mean of (exp(delta A) - 1) / A, if asked for.
    Layers with g > 1 groups have [batch, tokens, g, n] (delta: [batch, tokens, g]).
    mask: [batch, tokens], true where there is a token and not padding; None: everywhere.
    """

    a: Tensor
    c: Tensor
    b: Tensor
    delta: Tensor
    zoh: Tensor | None
    mask: Tensor | None = None


class StateTap(Protocol):
    """Receives the states of a mixer's forward pass."""

    zoh: bool
    """Whether to compute the zero-order-hold factor too."""
    include_dt_bias: bool
    """Whether the states are those of the scan that ran (else without the bias of the step size)."""

    @property
    def stop(self) -> bool:
        """Whether to compute states only; ``emit`` then raises to end the forward pass."""

    def emit(self, mixer: SSMMixer, states: list[RawStates]) -> None:
        """Take the states of one forward pass, one entry per scan direction."""


class SSMMixer(nn.Module, ABC):
    """Base of all mixers: a token mixer that hands its states to ``tap`` whenever one is set."""

    tap: StateTap | None = None
    scan_hook: Callable[[ScanInputs], None] | None = None
    """Called with the inputs of every scan before it runs, one direction at a time: for studies of what layers do.
    Those of Mamba-2 are as `scan_ssd` takes them."""
    calls_scan_hook: bool = True
    """Whether the layer scans and calls it: S4D is a convolution."""

    @abstractmethod
    def state_parameters(self, which: str) -> list[StateRows]:
        """Return the parameters (and their rows) that form the states; ``which`` is one of ``STATE_SETS``."""

    def run_scans(
        self, scans: Iterable[ScanInputs], *, out_scale: float = 1.0, mask: Tensor | None = None
    ) -> list[Tensor]:
        """Run every scan, and emit the states of all of them when a tap is set.

        Each scan runs as soon as it is prepared, while its inputs are still in the cache: pass a generator.
        ``out_scale`` multiplies the outputs (folded into B and D, which are small). mask: [batch, tokens], False where
        padded; the states carry it.
        """
        tap, outputs, states = self.tap, [], []
        for x in scans:
            if self.scan_hook is not None:
                self.scan_hook(x)
            if tap is not None and tap.stop:
                states.append(states_only(x, tap, mask))
                continue
            scaled = x
            if out_scale != 1.0:
                scaled = x._replace(B=x.B * out_scale, D=None if x.D is None else x.D * out_scale)
            if tap is None:
                outputs.append(scan(scaled).y)
            elif tap.include_dt_bias:
                found = scan(scaled, states="zoh" if tap.zoh else True)
                assert found.states is not None
                outputs.append(found.y)
                states.append(RawStates(found.states.a, x.C, x.B, found.states.delta, found.states.zoh, mask))
            else:
                with beside_checkpoint():
                    states.append(states_only(x, tap, mask))
                outputs.append(scan(scaled).y)
        self.emit(states)
        return outputs

    def emit(self, states: list[RawStates]) -> None:
        """Hand the states of one forward pass, one entry per scan direction, to the tap."""
        if self.tap is None:
            return
        self.tap.emit(self, states)
        if self.tap.stop:
            raise RuntimeError("a tap with stop=True must raise from emit to end the forward pass")


def beside_checkpoint() -> saved_tensors_hooks:
    """Keep what autograd saves for states out of a gradient checkpoint around the mixer.

    A checkpoint's recomputation must save the same tensors as the forward did, whether or not a tap is still set.
    """
    return saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def states_only(x: ScanInputs, tap: StateTap, mask: Tensor | None) -> RawStates:
    """The states that ``tap`` asks for, without the scan."""
    states = mean_states(
        x.delta,
        x.A,
        delta_bias=x.delta_bias if tap.include_dt_bias else None,
        delta_softplus=x.delta_softplus,
        groups=x.B.shape[2] if x.B.ndim == 4 else None,
        zoh=tap.zoh,
    )
    return RawStates(states.a, x.C, x.B, states.delta, states.zoh, mask)


def at_least_float32(x: Tensor) -> Tensor:
    """Float32 for half precision; float64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_state_set(which: str) -> None:
    """Raise unless ``which`` names a parameter set."""
    if which not in STATE_SETS:
        raise ConfigError(f"unknown parameter set {which!r}; known: {', '.join(STATE_SETS)}")


class LayerState(NamedTuple):
    """The memory of one layer of the tokens before.

    hidden: [batch, channels, n], complex for S4D. tail: [batch, width - 1, channels], the last inputs of the causal
    convolution in front of the scan; None if there is none.
    """

    hidden: Tensor
    tail: Tensor | None = None


@dataclass(frozen=True)
class SequenceState:
    """The memory of a causal model of the tokens before; its size does not depend on their number.

    Attributes:
        layers: the state of each layer, from the input to the output.
        total: [batch, dim], float64, the sum of the features of all tokens so far; None if the model does not take
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
