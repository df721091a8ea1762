"""What a forward gives beside states: the features that the last layer is given, and the logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.features import output_layer
from infssm.ssm.mixers import unwrap
from infssm.ssm.recorder import StopForward
from infssm.ssm.space import StateSpace


class Observation(NamedTuple):
    """What one forward gave, as far as it was asked for.

    states: one entry per layer and scan direction. features: ``[b, d]``, of language models ``[b, tokens, d]``.
    logits: ``[b, K]``, of language models ``[b, tokens, vocabulary]``.
    """

    states: list[StateSpace]
    features: Tensor | None = None
    logits: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Rows of the forward; 1 where all that was asked for are states that do not depend on the input."""
        return max(len(rows) for rows in (self.logits, self.features, *(s.a for s in self.states)) if rows is not None)

    def rows(self, rows: slice | Tensor) -> Observation:
        """The given rows, a slice or indices; states that do not depend on the input have one row, which stays."""

        def take(tensor: Tensor) -> Tensor:
            return tensor if len(tensor) == 1 else tensor[rows]

        features, logits = (None if t is None else take(t) for t in (self.features, self.logits))
        return Observation([space.rows(take) for space in self.states], features, logits)


class OutputRecorder:
    """Keeps features and logits of a model's last forward inside ``with recorder.recording():``."""

    def __init__(self, model: nn.Module, *, features: bool, logits: bool) -> None:
        self._model = model
        self._features, self._logits = features, logits
        self._stop = False
        self._seen: dict[str, Tensor] = {}
        self.with_gradient = True
        """Whether gradients were enabled in the recorded forward."""

    @contextlib.contextmanager
    def recording(self, *, stop: bool = False) -> Iterator[OutputRecorder]:
        """Record the forwards of the block; with ``stop``, end each one where its features are known."""
        self.clear()
        self._stop = stop
        handles = []
        if self._features:
            handles.append(output_layer(unwrap(self._model)).register_forward_pre_hook(self._take_features))
        if self._logits:
            handles.append(self._model.register_forward_hook(self._take_logits))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def taken(self) -> dict[str, Tensor]:
        """``features`` and ``logits`` of the last forward, those that are recorded."""
        wanted = {"features"} if self._features else set()
        wanted |= {"logits"} if self._logits else set()
        if wanted != self._seen.keys():
            raise ConfigError("no forward pass was recorded; run the model inside 'with recorder.recording():'")
        return dict(self._seen)

    def clear(self) -> None:
        """Forget the last record, and with it the graph it keeps alive."""
        self._seen = {}

    def _take_features(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        self._seen["features"] = _at_least_float32(args[0])
        self.with_gradient = torch.is_grad_enabled()
        if self._stop:
            raise StopForward

    def _take_logits(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        self._seen["logits"] = _at_least_float32(logits_of(output))
        self.with_gradient = torch.is_grad_enabled()


def logits_of(output: Any) -> Tensor:
    """Logits of a model's output: the tensor itself, or ``.logits`` of a structured output."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"the model must return logits or an object with .logits, got {type(output).__name__}")
    return logits


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
