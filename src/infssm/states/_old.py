"""The old model: a frozen copy that computes states and nothing after them, or features."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from infssm.geometry import StateSpace
from infssm.models.features import features
from infssm.states._mixers import Layers, unwrap
from infssm.states._probe import BMode
from infssm.states._recorder import Recorder, StopForward


class OldModel:
    """A frozen copy of ``module`` that runs states-only: no gradient, no head, no scan in the last recorded mixer.

    It is no ``nn.Module``, so a model that holds one does not save, move or train it by accident.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        include_dt_bias: bool = True,
        b_mode: BMode = "raw",
        layers: Layers = "all",
    ) -> None:
        self.module = copy.deepcopy(unwrap(module)).eval().requires_grad_(False)
        config: Any = getattr(self.module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # the old model never generates: caches would be dead weight
        self._make_recorder = partial(
            Recorder, self.module, include_dt_bias=include_dt_bias, b_mode=b_mode, layers=layers
        )

    @cached_property
    def _recorder(self) -> Recorder:
        """Made when states are first asked for: features need no state space layers."""
        return self._make_recorder()

    def states(self, x: Tensor | Mapping[str, Any], **kwargs: Any) -> list[StateSpace]:
        """States of ``module(x, **kwargs)``, layer by layer; a mapping ``x`` is passed as keyword arguments."""
        with torch.no_grad(), self._recorder.recording(stop=True):
            try:
                if isinstance(x, Mapping):
                    self.module(**x, **kwargs)
                else:
                    self.module(x, **kwargs)
            except StopForward:
                pass
            states = self._recorder.flat()
            self._recorder.clear()
        return states

    @torch.no_grad()
    def features(self, x: Tensor | Mapping[str, Any]) -> Tensor:
        """Features ``[b, d]`` of ``x``: what the copy's classifier is given."""
        return features(self.module, x)

    def to(self, device: torch.device | str) -> OldModel:
        """Move the copy to a device."""
        self.module.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """The copy's weights."""
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.module.load_state_dict(state)
