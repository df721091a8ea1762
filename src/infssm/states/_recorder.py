"""Recording: the states a model's mixers form during a forward pass, while a recording is on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from infssm.errors import ConfigError
from infssm.geometry import StateSpace
from infssm.models import RawStates, SSMMixer
from infssm.models._mixer import beside_checkpoint
from infssm.states._mixers import Layers, find_mixers
from infssm.states._probe import BMode, MixerInputs, Probe, StateOptions, probe_for

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
        if any(mixer in _RECORDED for mixer in self._mixers.values()):
            raise ConfigError("this model is being recorded already; leave the other recording first")
        self.clear()
        self._stop = stop
        handles: list[RemovableHandle] = []
        try:
            for name, mixer in self._mixers.items():
                _RECORDED.add(mixer)
                handles += _install(mixer, _Tap(self, name))
            yield self
        finally:
            for mixer in self._mixers.values():
                _RECORDED.discard(mixer)
                if isinstance(mixer, SSMMixer):
                    mixer.tap = None
            for handle in handles:
                handle.remove()

    def _is_last(self, name: str) -> bool:
        """Whether every other mixer has run in this forward."""
        return len(self._record) - (name in self._record) == len(self._mixers) - 1

    def _add(self, name: str, spaces: list[StateSpace]) -> None:
        stop = self._stop and self._is_last(name)
        if self._record and name == next(iter(self._record)):
            self._record = {}
        self._record.setdefault(name, []).extend(space.map(_at_least_float32) for space in spaces)
        if stop:
            raise StopForward


def _install(mixer: nn.Module, tap: _Tap) -> list[RemovableHandle]:
    if isinstance(mixer, SSMMixer):
        mixer.tap = tap
        return []
    probe = probe_for(mixer)
    assert probe is not None
    return [mixer.register_forward_pre_hook(_ProbeHook(tap, probe), with_kwargs=True)]


class _Tap:
    """The end of a recorder that sits on one mixer. Copies of a model being recorded get ``None`` in its place."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name
        self.zoh = recorder.options.b_mode == "zoh"
        self.include_dt_bias = recorder.options.include_dt_bias

    @property
    def stop(self) -> bool:
        return self.recorder._stop and self.recorder._is_last(self.name)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def emit(self, mixer: SSMMixer, states: list[RawStates]) -> None:  # noqa: ARG002
        """Take the states of one of our mixers."""
        if in_backward():
            return
        _reject_reentrant_checkpoint()
        options = self.recorder.options
        with beside_checkpoint():
            spaces = [StateSpace(s.a, s.c, options.b(s.b, s.delta, s.zoh)) for s in states]
            self.recorder._add(self.name, spaces)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


class _ProbeHook:
    """Forward pre-hook of a foreign mixer. Copies of a model being recorded get a hook that does nothing."""

    def __init__(self, tap: _Tap, probe: Probe) -> None:
        self.tap = tap
        self.probe = probe

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward():
            return
        _reject_reentrant_checkpoint()
        recorder = self.tap.recorder
        inputs = MixerInputs(args, kwargs, recorder.options)
        device = next(mixer.parameters()).device.type
        with beside_checkpoint(), torch.autocast(device, enabled=False):
            recorder._add(self.tap.name, self.probe.states(mixer, inputs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return (_get_no_hook, ())


def no_hook(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What a copy of a recorded model has in the place of its hook."""


def _get_no_hook() -> Any:
    return no_hook


def in_backward() -> bool:
    """Whether autograd is running a backward pass: the forward is then a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1


def _reject_reentrant_checkpoint() -> None:
    """States formed inside a reentrant checkpoint carry no gradient, and a penalty on them would do nothing."""
    if torch.is_grad_enabled():
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__ and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in frame.f_locals["args"]
        ):
            raise ConfigError(
                "states recorded inside a reentrant gradient checkpoint carry no gradient; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), in transformers "
                "model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
        frame = frame.f_back  # type: ignore[assignment]


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

    ``states`` maps layer names to one :class:`~infssm.geometry.StateSpace` per scan direction (a, b, c:
    [batch, tokens, n]) of the last forward, and stays readable after the block. See :class:`Recorder`.
    """
    recorder = Recorder(model, include_dt_bias=include_dt_bias, b_mode=b_mode, layers=layers)
    with recorder.recording():
        yield StateRecord(recorder)
