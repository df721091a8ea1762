"""State that is saved with a model, so that training can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor


class Stateful:
    """Saves and restores the attributes named in ``saved``.

    These are tensors, plain values, dictionaries of them, random generators, or objects with a state of their own.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on, made of tensors and plain values."""
        return {name: _copied(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in self.saved:
            own = getattr(self, name)
            if isinstance(own, torch.Generator):
                own.set_state(state[name].cpu())
            elif hasattr(own, "load_state_dict"):
                own.load_state_dict(state[name])
            else:
                setattr(self, name, _copied(state[name]))


def _copied(value: Any) -> Any:
    """The state of an attribute, which later changes of the attribute leave alone."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value
