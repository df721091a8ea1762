"""What every state space mixer of infssm shares: the scans it runs and how their states come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from infssm.errors import ConfigError
from infssm.kernels import ScanStates, mean_states, selective_scan

StateRows = tuple[Tensor, "slice | None"]
"""A parameter and the rows of it that form states (``None``: all rows)."""

STATE_SETS = ("AC-direct", "ABC-direct", "ABC-full")


class RawStates(NamedTuple):
    """States of one scan direction, one row per token, before any soft normalisation.

    a: [batch, tokens, n] mean over channels of the discretised transition; [..., 1] when the transition is scalar.
    c, b: [batch, tokens, n] output and input vectors as the projections give them.
    delta: [batch, tokens] mean step size. zoh: [batch, tokens, n] mean of (exp(delta A) - 1) / A, if asked for.
    Layers with g > 1 groups have [batch, tokens, g, n] (delta: [batch, tokens, g]).
    """

    a: Tensor
    c: Tensor
    b: Tensor
    delta: Tensor
    zoh: Tensor | None


class StateTap(Protocol):
    """Receives the states of a mixer's forward pass."""

    @property
    def zoh(self) -> bool:
        """Whether to compute the zero-order-hold factor too."""

    @property
    def include_dt_bias(self) -> bool:
        """Whether the states are those of the scan that ran (else without the bias of the step size)."""

    @property
    def stop(self) -> bool:
        """Whether to compute states only; ``emit`` then raises to end the forward pass."""

    def emit(self, mixer: SSMMixer, states: list[RawStates]) -> None:
        """Take the states of one forward pass, one entry per scan direction."""


class Scan(NamedTuple):
    """One scan direction, ready to run.

    u, delta, z: [batch, tokens, channels]; A: [channels, n]; B, C: [batch, tokens, n] or [batch, tokens, groups, n];
    D, bias: [channels]. ``out_scale`` multiplies the output (folded into B and D, which are small).
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    bias: Tensor
    z: Tensor | None = None
    reverse: bool = False
    out_scale: float = 1.0


class SSMMixer(nn.Module, ABC):
    """Base of all mixers: a token mixer that hands its states to ``tap`` whenever one is set."""

    tap: StateTap | None = None

    @abstractmethod
    def state_parameters(self, which: str) -> list[StateRows]:
        """Return the parameters (and their rows) that form the states; ``which`` is one of ``STATE_SETS``."""

    def run_scans(self, scans: Iterable[Scan]) -> list[Tensor]:
        """Run every scan, and emit the states of all of them when a tap is set.

        Each scan runs as soon as it is prepared, while its inputs are still in the cache: pass a generator.
        """
        if self.tap is None:
            return [_output(scan) for scan in scans]
        if self.tap.stop:
            self.emit([_states_only(scan, self.tap) for scan in scans])
        pairs = [_output_and_states(scan, self.tap) for scan in scans]
        self.emit([states for _, states in pairs])
        return [y for y, _ in pairs]

    def emit(self, states: list[RawStates]) -> None:
        """Hand the states of one forward pass, one entry per scan direction, to the tap."""
        if self.tap is None:
            return
        self.tap.emit(self, states)
        if self.tap.stop:
            raise RuntimeError("a tap with stop=True must raise from emit to end the forward pass")


def _scan(scan: Scan, return_states: bool | Literal["zoh"]) -> Any:
    scale = scan.out_scale
    return selective_scan(
        scan.u,
        scan.delta,
        scan.A,
        scan.B if scale == 1.0 else scan.B * scale,
        scan.C,
        scan.D if scale == 1.0 else scan.D * scale,
        z=scan.z,
        delta_bias=scan.bias,
        delta_softplus=True,
        reverse=scan.reverse,
        return_states=return_states,
    )


def _output(scan: Scan) -> Tensor:
    y: Tensor = _scan(scan, False)
    return y


def _output_and_states(scan: Scan, tap: StateTap) -> tuple[Tensor, RawStates]:
    if not tap.include_dt_bias:
        with beside_checkpoint():
            states_only = _states_only(scan, tap)
        return _output(scan), states_only
    y, states = _scan(scan, "zoh" if tap.zoh else True)
    return y, _raw(scan, states)


def beside_checkpoint() -> saved_tensors_hooks:
    """Keep what autograd saves for states out of a gradient checkpoint around the mixer.

    A checkpoint's recomputation must save the same tensors as the forward did, whether or not a tap is still set.
    """
    return saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _states_only(scan: Scan, tap: StateTap) -> RawStates:
    states = mean_states(
        scan.delta,
        scan.A,
        delta_bias=scan.bias if tap.include_dt_bias else None,
        delta_softplus=True,
        groups=scan.B.shape[2] if scan.B.ndim == 4 else None,
        zoh=tap.zoh,
    )
    return _raw(scan, states)


def _raw(scan: Scan, states: ScanStates) -> RawStates:
    return RawStates(a=states.a, c=scan.C, b=scan.B, delta=states.delta, zoh=states.zoh)


def at_least_float32(x: Tensor) -> Tensor:
    """Float32 for half precision; float64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_state_set(which: str) -> None:
    """Raise unless ``which`` names a parameter set."""
    if which not in STATE_SETS:
        raise ConfigError(f"unknown parameter set {which!r}; known: {', '.join(STATE_SETS)}")
