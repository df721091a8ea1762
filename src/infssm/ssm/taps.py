"""What a recorder puts on mixers; kept out of compiled code, which would trace into the recorder.

Imported with the first recording: ``torch.compiler.disable`` loads all of torch's compiler.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from infssm.errors import ConfigError
from infssm.models import RawStates, SSMMixer
from infssm.models.mixer import beside_checkpoint
from infssm.ssm.probe import MixerInputs, Probe, as_mask, probe_for
from infssm.ssm.space import StateSpace

if TYPE_CHECKING:
    from infssm.ssm.recorder import Recorder


def install(mixer: nn.Module, recorder: Recorder, name: str) -> list[RemovableHandle]:
    """Put a tap (our mixers) or a hook (foreign ones) on the mixer that the recorder knows by ``name``."""
    tap = _Tap(recorder, name)
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
            spaces = [StateSpace(s.a, s.c, options.b(s.b, s.delta, s.zoh), as_mask(s.mask)) for s in states]
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
