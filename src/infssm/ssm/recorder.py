"""Recording what a model computes in its forward passes: the states of its mixers, its features and its logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infssm.errors import ConfigError
from infssm.models import SSMMixer
from infssm.models.features import output_layer
from infssm.models.mixer import at_least_float32
from infssm.ssm.mixers import Layers, find_mixers, unwrap
from infssm.ssm.probe import BMode, StateOptions
from infssm.ssm.space import StateSpace

_NOTHING = "no forward pass was recorded; run the model inside 'with recorder.recording():'"
_RECORDED: WeakSet[nn.Module] = WeakSet()
"""Mixers that are being recorded now."""


class StopForward(BaseException):
    """Ends a forward pass once everything requested is known; not an Exception, so that no model swallows it."""


class Recorder:
    """Records what a model's forward passes compute inside ``with recorder.recording():``: states, features, logits.

    Outside of it nothing is installed on the model. What is recorded belongs to the last forward: the next forward
    starts a new record. A new forward is recognised by the first mixer running again, so of a first mixer that runs
    several times in one forward only the last run is kept. The recomputation of a gradient checkpoint during backward
    is not recorded. All is part of the autograd graph of its forward, and float32 (float64 for float64 models) under
    any autocast.

    ``layers`` to ``h``: of states, see :func:`record_states`. Features are the input of the output layer; recording
    them and logits alone needs no state space layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        include_dt_bias: bool = True,
        b_mode: BMode = "raw",
        layers: Layers = "all",
        h: bool = False,
        states: bool = True,
        features: bool = False,
        logits: bool = False,
    ) -> None:
        self._model, self._features, self._logits = model, features, logits
        self._outputs: dict[str, Tensor] = {}
        self._stop_at_features = self.stop = False
        """``stop``: whether forwards end once the last mixer's states are known."""
        self.options = StateOptions(include_dt_bias, b_mode)
        self.h = h
        self.hidden: dict[str, list[Tensor]] = {}
        """Hidden states of the last forward, if they are recorded."""
        self.finished: set[str] = set()
        """Mixers whose states of a forward are complete."""
        self.mixers = find_mixers(model, layers) if states else {}
        self.record: dict[str, list[StateSpace]] = {}
        self.with_gradient = True
        """Whether gradients were enabled in the recorded forward."""

    @property
    def names(self) -> list[str]:
        """Names of the recorded mixers, in order."""
        return list(self.mixers)

    @property
    def states(self) -> dict[str, list[StateSpace]]:
        """States of the last forward, one entry per scan direction of each mixer, in the order of ``names``."""
        if not self.record:
            raise ConfigError(_NOTHING)
        return {name: list(self.record[name]) for name in self.mixers if name in self.record}

    def flat(self) -> list[StateSpace]:
        """States of the last forward as one list, layer by layer."""
        if not self.record:
            raise ConfigError(_NOTHING)
        spaces: list[StateSpace] = []
        for name in self.mixers:
            spaces += self.record.get(name, ())
        return spaces

    def taken(self) -> Observation:
        """All that was recorded of the last forward, which the recorder forgets."""
        if len(self._outputs) < self._features + self._logits:
            raise ConfigError(_NOTHING)
        found = Observation(self.flat() if self.mixers else [], **self._outputs)
        self.clear()
        return found

    def clear(self) -> None:
        """Drop the last record, and with it the autograd graph it keeps alive."""
        self.record, self.hidden, self._outputs = {}, {}, {}

    def _check_hidden(self) -> None:
        """Raise unless every layer is one whose scan can be seen."""
        for name, mixer in self.mixers.items():
            if not (isinstance(mixer, SSMMixer) and mixer.calls_scan_hook):
                raise ConfigError(
                    f"h=True needs selective or Mamba-2 layers of infssm, or of transformers after "
                    f"infssm.integrations.transformers.accelerate(model); {name} is a {type(mixer).__name__}"
                )

    @contextmanager
    def recording(self, *, stop: bool = False) -> Iterator[Recorder]:
        """Record the forward passes of the block; with ``stop``, end each one once everything asked for is known."""
        if self.mixers:
            from infssm.ssm.taps import HiddenTap, ProbeHook, Tap  # imports torch's compiler, which takes a second

        for mixer in self.mixers.values():
            if mixer in _RECORDED:
                raise ConfigError("this model is being recorded already; leave the other recording first")
        self.record, self._outputs = {}, {}
        self.stop = stop and not (self._features or self._logits)
        self._stop_at_features = stop and not self._logits
        if self.h:
            self._check_hidden()
        handles: list[RemovableHandle] = []
        try:
            for name, mixer in self.mixers.items():
                _RECORDED.add(mixer)
                if isinstance(mixer, SSMMixer):
                    mixer.tap = Tap(self, name)
                    if self.h:
                        mixer.scan_hook = HiddenTap(self, name)
                else:
                    handles.append(mixer.register_forward_pre_hook(ProbeHook(self, name, mixer), with_kwargs=True))
            if self._features:
                handles.append(output_layer(unwrap(self._model)).register_forward_pre_hook(self._take_features))
            if self._logits:
                handles.append(self._model.register_forward_hook(self._take_logits))
            yield self
        finally:
            for mixer in self.mixers.values():
                _RECORDED.discard(mixer)
                if isinstance(mixer, SSMMixer):
                    object.__setattr__(mixer, "tap", None)  # nn.Module's own __setattr__ fails at interpreter shutdown
                    if self.h:
                        object.__setattr__(mixer, "scan_hook", None)
            for handle in handles:
                handle.remove()

    def _take_features(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        self._outputs["features"] = at_least_float32(args[0])
        self.with_gradient = torch.is_grad_enabled()
        if self._stop_at_features:
            raise StopForward

    def _take_logits(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        self._outputs["logits"] = at_least_float32(logits_of(output))
        self.with_gradient = torch.is_grad_enabled()


class StateRecord(Mapping[str, list[StateSpace]]):
    """States of the last forward by mixer name; see :func:`record_states`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getitem__(self, name: str) -> list[StateSpace]:
        return self._recorder.states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recorder.record and self._recorder.states)

    def __len__(self) -> int:
        return len(self._recorder.record)

    def flat(self) -> list[StateSpace]:
        """All states as one list, layer by layer."""
        return self._recorder.flat()

    @property
    def h(self) -> dict[str, list[Tensor]]:
        """Hidden states by layer, one [batch, tokens, channels, n] per direction; needs ``record_states(h=True)``."""
        if not self._recorder.h:
            raise ConfigError("hidden states were not recorded; use record_states(model, h=True)")
        return dict(self._recorder.hidden)


@contextmanager
def record_states(
    model: nn.Module,
    *,
    include_dt_bias: bool = True,
    b_mode: BMode = "raw",
    layers: Layers = "all",
    h: bool = False,
) -> Iterator[StateRecord]:
    """Record the states of the forward passes of the block: ``with record_states(model) as states: model(x)``.

    ``states`` maps layer names to one :class:`~infssm.ssm.StateSpace` per scan direction (a, b, c:
    [batch, tokens, n]) of the last forward, and stays readable after the block. See :class:`Recorder`. With ``h=True``,
    ``states.h`` holds the hidden states of selective and Mamba-2 layers, [batch, tokens, channels, n] per direction: n
    times as large as the activations.
    """
    recorder = Recorder(model, include_dt_bias=include_dt_bias, b_mode=b_mode, layers=layers, h=h)
    with recorder.recording():
        yield StateRecord(recorder)


class Observation(NamedTuple):
    """The records of one forward.

    states: one entry per layer and scan direction. features: ``[b, d]``, of language models ``[b, tokens, d]``.
    logits: ``[b, K]``, of language models ``[b, tokens, vocabulary]``. None if not requested.
    """

    states: list[StateSpace]
    features: Tensor | None = None
    logits: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Rows of the forward; 1 where only states that do not depend on the input were recorded."""
        largest = 0 if self.logits is None else len(self.logits)
        if self.features is not None:
            largest = max(largest, len(self.features))
        for space in self.states:
            largest = max(largest, len(space.a))
        return largest

    def rows(self, rows: slice | Tensor) -> Observation:
        """Some rows of the batch, as a slice or indices; states that do not depend on the input keep their one row."""

        def take(tensor: Tensor) -> Tensor:
            return tensor if len(tensor) == 1 else tensor[rows]

        features, logits = (None if t is None else take(t) for t in (self.features, self.logits))
        return Observation([space.map_batch(take) for space in self.states], features, logits)


def logits_of(output: Any) -> Tensor:
    """Logits of a model's output: the tensor itself, or ``.logits`` of a structured output."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"the model must return logits or an object with .logits, got {type(output).__name__}")
    return logits
