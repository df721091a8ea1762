"""The old model: a frozen copy that computes what it is asked for and nothing after it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.features import features
from infssm.ssm.adapters import active_adapters, set_active_adapters
from infssm.ssm.mixers import Layers, unwrap
from infssm.ssm.outputs import Observation, OutputRecorder
from infssm.ssm.probe import BMode
from infssm.ssm.recorder import Recorder, StopForward
from infssm.ssm.sharing import SharedTensors, copy_trained
from infssm.ssm.space import StateSpace

_ADAPTERS = "active_adapters"


class OldModel:
    """A frozen copy of ``module`` without gradient; for states alone, without head and the last recorded mixer's scan.

    It has tensors of its own for what trains in ``module`` and for buffers, and shares what is frozen: of a model with
    an adapter it holds the adapter alone. What is unfrozen later gets its copy then. It is no ``nn.Module``, so a model
    that holds one does not save, move or train it by accident.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        include_dt_bias: bool = True,
        b_mode: BMode = "raw",
        layers: Layers = "all",
    ) -> None:
        module = unwrap(module)
        self.module = copy_trained(module).eval().requires_grad_(False)
        self._shared = SharedTensors(module, self.module)
        config: Any = getattr(self.module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # the old model never generates: caches would be dead weight
        self._make_recorder = partial(
            Recorder, self.module, include_dt_bias=include_dt_bias, b_mode=b_mode, layers=layers
        )

    @cached_property
    def _recorder(self) -> Recorder:
        """Made when states are first asked for: features and logits need no state space layers."""
        return self._make_recorder()

    def states(self, x: Tensor | Mapping[str, Any], **kwargs: Any) -> list[StateSpace]:
        """States of ``module(x, **kwargs)``, layer by layer; a mapping ``x`` is passed as keyword arguments."""
        return self.observe(x, **kwargs).states

    @torch.no_grad()
    def observe(
        self,
        x: Tensor | Mapping[str, Any],
        *,
        states: bool = True,
        features: bool = False,
        logits: bool = False,
        **kwargs: Any,
    ) -> Observation:
        """All that is asked for of one forward ``module(x, **kwargs)``, which ends as soon as it is known."""
        self.follow()
        outputs = OutputRecorder(self.module, features=features, logits=logits)
        with contextlib.ExitStack() as stack:
            if states:
                stack.enter_context(self._recorder.recording(stop=not (features or logits)))
            stack.enter_context(outputs.recording(stop=not logits))
            with contextlib.suppress(StopForward):
                self._forward(x, kwargs)
            found = Observation(self._recorder.flat() if states else [], **outputs.taken())
            if states:
                self._recorder.clear()
        return found

    def _forward(self, x: Tensor | Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        if not isinstance(x, Mapping):
            self.module(x, **kwargs)
            return
        # Of labels, models of transformers compute a loss that nobody reads here.
        unread = {"labels"} if hasattr(self.module, "config") else set()
        self.module(**{key: value for key, value in x.items() if key not in unread}, **kwargs)

    @torch.no_grad()
    def features(self, x: Tensor | Mapping[str, Any]) -> Tensor:
        """Features ``[b, d]`` of ``x``: what the copy's classifier is given."""
        self.follow()
        return features(self.module, x)

    def follow(self) -> None:
        """Part from what was frozen and trains by now; to be called before its first change, as every forward does."""
        self._shared.follow()

    def is_stale(self) -> bool:
        """Whether what is shared has other values by now: an adapter was merged into the weights it stood beside."""
        return self._shared.changed()

    def to(self, device: torch.device | str) -> OldModel:
        """Move the copy to a device; what is shared stays with the new model."""
        self.module._apply(  # type: ignore[no-untyped-call]
            lambda tensor: tensor if tensor in self._shared else tensor.to(device)
        )
        return self

    def state_dict(self) -> dict[str, Any]:
        """The copy's own tensors, without those it shares; of a model with adapters also which of them are active."""
        own = {key: value for key, value in self.module.state_dict(keep_vars=True).items() if value not in self._shared}
        adapters = active_adapters(self.module)
        return own | {_ADAPTERS: adapters} if adapters else own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; what was shared then is loaded with the model, before or after."""
        own = {key: value for key, value in state.items() if key != _ADAPTERS}
        tensors = self.module.state_dict(keep_vars=True)
        for key in own.keys() & tensors.keys():
            if tensors[key] in self._shared:
                self._shared.separate(tensors[key])
        # What is missing was shared with the model, whose values this copy was made of.
        if unknown := self.module.load_state_dict(own, strict=False).unexpected_keys:
            raise ConfigError(f"this is the old model of another model: unknown tensors {', '.join(unknown[:3])}")
        set_active_adapters(self.module, state.get(_ADAPTERS, {}))
        self._shared.loaded()
