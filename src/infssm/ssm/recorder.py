"""Recording: the states a model's mixers form during a forward pass, while a recording is on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infssm.errors import ConfigError
from infssm.models import SSMMixer
from infssm.ssm.mixers import Layers, find_mixers
from infssm.ssm.probe import BMode, StateOptions
from infssm.ssm.space import StateSpace

_RECORDED: WeakSet[nn.Module] = WeakSet()


class StopForward(BaseException):
    """Ends a states-only forward pass; not an Exception, so that no handler inside a model swallows it."""


class Recorder:
    """Records the states of a model's forward passes inside ``with recorder.recording():``.

    Outside of it nothing is installed on the model. ``states`` belong to the last forward: the next forward starts a
    new record (it is known by the first mixer running again, so a first mixer that runs several times in one forward
    keeps its last run only); a checkpoint's recomputation during backward is not recorded. States are part of the
    autograd graph of their forward, float32 (float64 for float64 models) under any autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        include_dt_bias: bool = True,
        b_mode: BMode = "raw",
        layers: Layers = "all",
    ) -> None:
        self.options = StateOptions(include_dt_bias, b_mode)
        self._mixers = find_mixers(model, layers)
        self._record: dict[str, list[StateSpace]] = {}
        self._stop = False
        self.with_gradient = True
        """Whether gradients were enabled in the recorded forward."""

    @property
    def names(self) -> list[str]:
        """Names of the recorded mixers, in order."""
        return list(self._mixers)

    @property
    def states(self) -> dict[str, list[StateSpace]]:
        """States of the last forward, one entry per scan direction of each mixer, in the order of ``names``."""
        if not self._record:
            raise ConfigError("no forward pass was recorded; run the model inside 'with recorder.recording():'")
        return {name: list(self._record[name]) for name in self._mixers if name in self._record}

    def flat(self) -> list[StateSpace]:
        """States of the last forward as one list, layer by layer."""
        return [space for spaces in self.states.values() for space in spaces]

    def clear(self) -> None:
        """Forget the last record, and with it the graph it keeps alive."""
        self._record = {}

    @contextmanager
    def recording(self, *, stop: bool = False) -> Iterator[Recorder]:
        """Record the forward passes of the block; with ``stop``, end each one after the last mixer's projections."""
        from infssm.ssm.taps import install  # loads torch's compiler: a second that imports need not take

        if any(mixer in _RECORDED for mixer in self._mixers.values()):
            raise ConfigError("this model is being recorded already; leave the other recording first")
        self.clear()
        self._stop = stop
        handles: list[RemovableHandle] = []
        try:
            for name, mixer in self._mixers.items():
                _RECORDED.add(mixer)
                handles += install(mixer, self, name)
            yield self
        finally:
            for mixer in self._mixers.values():
                _RECORDED.discard(mixer)
                if isinstance(mixer, SSMMixer):
                    object.__setattr__(mixer, "tap", None)  # the module's own way fails when Python is shutting down
            for handle in handles:
                handle.remove()

    def _is_last(self, name: str) -> bool:
        """Whether every other mixer has run in this forward."""
        return len(self._record) - (name in self._record) == len(self._mixers) - 1

    def _add(self, name: str, spaces: list[StateSpace]) -> None:
        stop = self._stop and self._is_last(name)
        if self._record and name == next(iter(self._record)):
            self._record = {}
        self.with_gradient = torch.is_grad_enabled()
        self._record.setdefault(name, []).extend(space.map(_at_least_float32) for space in spaces)
        if stop:
            raise StopForward


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class StateRecord(Mapping[str, list[StateSpace]]):
    """States of the last forward by mixer name; see :func:`record_states`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getitem__(self, name: str) -> list[StateSpace]:
        return self._recorder.states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recorder._record and self._recorder.states)

    def __len__(self) -> int:
        return len(self._recorder._record)

    def flat(self) -> list[StateSpace]:
        """All states as one list, layer by layer."""
        return self._recorder.flat()


@contextmanager
def record_states(
    model: nn.Module, *, include_dt_bias: bool = True, b_mode: BMode = "raw", layers: Layers = "all"
) -> Iterator[StateRecord]:
    """Record the states of the forward passes of the block: ``with record_states(model) as states: model(x)``.

    ``states`` maps layer names to one :class:`~infssm.ssm.StateSpace` per scan direction (a, b, c:
    [batch, tokens, n]) of the last forward, and stays readable after the block. See :class:`Recorder`.
    """
    recorder = Recorder(model, include_dt_bias=include_dt_bias, b_mode=b_mode, layers=layers)
    with recorder.recording():
        yield StateRecord(recorder)
