"""Taps that a recorder installs on mixers: a tap on ours, a forward pre-hook on those of other libraries.

Both are kept out of compiled code, which would trace into the recorder. The recorder imports this file with the first
recording, because ``torch.compiler.disable`` imports all of torch's compiler.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from infssm.errors import ConfigError
from infssm.models import RawStates, SSMMixer
from infssm.models.mixer import at_least_float32, beside_checkpoint
from infssm.ops import ScanInputs
from infssm.ssm.hidden import hidden_states
from infssm.ssm.probe import MixerInputs, as_mask, probe_for
from infssm.ssm.recorder import Recorder, StopForward
from infssm.ssm.space import StateSpace

_HALF = (torch.float16, torch.bfloat16)


class _Attached:
    """What a recorder attaches to one mixer. Copies of a model that is being recorded get None instead."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


class Tap(_Attached):
    """Hands the states of one mixer to a recorder."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        super().__init__(recorder, name)
        self.zoh = recorder.options.b_mode == "zoh"
        self.include_dt_bias = recorder.options.include_dt_bias

    @property
    def stop(self) -> bool:
        """Whether the forward ends with this mixer: it may end, and every other mixer has run."""
        recorder = self.recorder
        return recorder.stop and len(recorder.record.keys() | {self.name}) == len(recorder.mixers)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def emit(self, mixer: SSMMixer, states: list[RawStates]) -> None:  # noqa: ARG002
        """Record the states of one of our mixers."""
        if not _is_recorded():
            return
        options, spaces = self.recorder.options, []
        with beside_checkpoint():
            for raw in states:
                b = raw.b if options.b_mode == "raw" else options.b(raw.b, raw.delta, raw.zoh)
                spaces.append(StateSpace(raw.a, raw.c, b, None if raw.mask is None else as_mask(raw.mask)))
            self.record(spaces)

    def record(self, spaces: list[StateSpace]) -> None:
        """Add the states to the record of this forward; the first mixer of the record begins a new one."""
        recorder, stop = self.recorder, self.stop
        recorder.finished.add(self.name)
        if recorder.record and self.name == next(iter(recorder.record)):
            recorder.record = {}
        recorder.with_gradient = torch.is_grad_enabled()
        record = recorder.record.setdefault(self.name, [])
        for space in spaces:
            half = space.a.dtype in _HALF or space.c.dtype in _HALF or (space.b is not None and space.b.dtype in _HALF)
            record.append(space.map(at_least_float32) if half else space)
        if stop:
            raise StopForward


class HiddenTap(_Attached):
    """Computes the hidden states of one mixer's scans."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, inputs: ScanInputs) -> None:
        """Keep the hidden states of a scan; the first scan after the layer's states were recorded is a new one's."""
        if not _is_recorded():
            return
        if self.name in self.recorder.finished:
            self.recorder.finished.discard(self.name)
            self.recorder.hidden[self.name] = []
        self.recorder.hidden.setdefault(self.name, []).append(hidden_states(inputs))


class ProbeHook(Tap):
    """Forward pre-hook of another library's mixer. Copies of a recorded model get a hook that does nothing."""

    def __init__(self, recorder: Recorder, name: str, mixer: nn.Module) -> None:
        super().__init__(recorder, name)
        self.probe = probe_for(mixer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Recompute the mixer's states from its input, and record them."""
        if not _is_recorded():
            return
        assert self.probe is not None
        device = next(mixer.parameters()).device.type
        with beside_checkpoint(), torch.autocast(device, enabled=False):
            self.record(self.probe.states(mixer, MixerInputs(args, kwargs, self.recorder.options)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return (_get_no_hook, ())


def no_hook(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook of a copy of a recorded model."""


def _get_no_hook() -> Any:
    return no_hook


def _is_recorded() -> bool:
    """Whether states of this forward are recorded: not those of a checkpoint's recomputation during backward.

    Raises inside a reentrant checkpoint, where states carry no gradient and a penalty on them would do nothing.
    """
    if torch._C._current_graph_task_id() != -1:
        return False
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__ and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in frame.f_locals["args"]
        ):
            raise ConfigError(
                "states recorded inside a reentrant gradient checkpoint carry no gradient; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), in transformers "
                "model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
        frame = frame.f_back
    return True
