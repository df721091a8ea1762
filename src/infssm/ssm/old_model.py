"""The old model: a frozen copy of a model that shares everything with it that does not train.

Beside a LoRA the copy costs the LoRA's bytes. Frozen tensors are shared, and must not change while they are: what is
unfrozen is copied before it trains, and any other change is an error.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.models.features import features
from infssm.ssm.mixers import unwrap
from infssm.ssm.recorder import Observation, Recorder, StopForward
from infssm.ssm.space import StateSpace

_ADAPTERS = "active_adapters"
_PACKED = (torch.uint8, torch.int8, torch.int16, torch.int32)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20
"""Elements that a checksum adds at once: a sum in int64 first makes an int64 copy of them."""


class OldModel:
    """A frozen copy of ``module``, run without gradient and only as far as it is needed.

    For states alone that is without the head and without the last recorded mixer's scan. The copy has tensors of its
    own for trained parameters and for buffers, and shares frozen parameters; those unfrozen later are copied then. It
    is not an ``nn.Module``, so a model that holds one does not save, move or train it by accident.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """``options``: how states are read, those of :class:`~infssm.ssm.Recorder`."""
        module = unwrap(module)
        frozen = list(_frozen(module))
        self.module = copy.deepcopy(module, {id(tensor): tensor for tensor in frozen}).eval().requires_grad_(False)
        self._shared = {id(tensor): _Shared.of(tensor) for tensor in frozen}
        self._is_loaded = False
        self._merged = [
            (layer, list(layer.merged_adapters))
            for _, layer in _adapter_layers(module)
            if hasattr(layer, "merged_adapters")
        ]
        config: Any = getattr(self.module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # comparing needs none, and it would take memory
        self._options = options
        self._recorders: dict[tuple[bool, ...], Recorder] = {}
        """By what is recorded; made when it is first asked for: features and logits need no state space layers."""

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
        """The requested records of one forward ``module(x, **kwargs)``, which ends as soon as they are complete."""
        self.follow()
        args: tuple[Any, ...] = (x,)
        if isinstance(x, Mapping):
            args, kwargs = (), {**x, **kwargs}
            if hasattr(self.module, "config"):
                kwargs.pop("labels", None)  # models of transformers would compute a loss that nobody reads
        recorder = self._recorders.get(asked := (states, features, logits))
        if recorder is None:
            found = Recorder(self.module, states=states, features=features, logits=logits, **self._options)
            recorder = self._recorders[asked] = found
        with recorder.recording(stop=True), contextlib.suppress(StopForward):
            self.module(*args, **kwargs)
        return recorder.taken()

    @torch.no_grad()
    def features(self, x: Tensor | Mapping[str, Any]) -> Tensor:
        """Features ``[b, d]`` of ``x``: the input of the copy's classifier."""
        self.follow()
        return features(self.module, x)

    def follow(self) -> None:
        """Copy parameters that have become trainable since the old model was frozen.

        To be called before their first change, as every forward of the old model does. Tensor values are read only
        where a version counter has changed, so this is cheap enough for every step.
        """
        if self._is_loaded:
            self._shared = {key: _Shared.of(shared.tensor) for key, shared in self._shared.items()}
            self._is_loaded = False
        for layer, merged in self._merged:
            if layer.merged_adapters != merged:
                # peft writes to weight.data, which autograd's version counter does not count.
                raise ConfigError(
                    "an adapter was merged into weights that the old model shares, or unmerged from them, in the "
                    "middle of a task: call merge_adapter() between end_task and begin_task, or unmerge_adapter() "
                    "before training on"
                )
        for shared in list(self._shared.values()):
            version = _version(shared.tensor)
            if version != shared.version:
                if _checksum(shared.tensor) != shared.checksum:
                    name = next((n for n, p in self.module.named_parameters() if p is shared.tensor), "a buffer")
                    raise ConfigError(
                        f"{name} was frozen when the last task ended, so the old model shares it, and was trained "
                        "since then without penalty(x) of its first step: unfreeze parameters before end_task, or "
                        "between begin_task and the first penalty"
                    )
                shared.version = version  # written with the same values, as by loading a checkpoint
            if shared.tensor.requires_grad:
                self._separate(shared.tensor)

    def _separate(self, tensor: Tensor) -> None:
        """Give the copy a parameter of its own in place of a shared one."""
        own = nn.Parameter(tensor.detach().clone(), requires_grad=False)
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            if parameter is tensor:
                owner, _, leaf = name.rpartition(".")
                self.module.get_submodule(owner)._parameters[leaf] = own
        del self._shared[id(tensor)]

    def is_stale(self) -> bool:
        """Whether shared tensors have other values by now: an adapter was merged into the weights it stood beside."""
        return any(_checksum(shared.tensor) != shared.checksum for shared in self._shared.values())

    def to(self, device: torch.device | str) -> OldModel:
        """Move the copy to a device; shared tensors stay where the new model has them."""
        self.module._apply(  # type: ignore[no-untyped-call]
            lambda tensor: tensor if id(tensor) in self._shared else tensor.to(device)
        )
        return self

    def state_dict(self) -> dict[str, Any]:
        """The copy's own tensors, without the shared ones, and the active adapters where the model has adapters."""
        tensors = self.module.state_dict(keep_vars=True)
        own: dict[str, Any] = {key: value for key, value in tensors.items() if id(value) not in self._shared}
        if active := {name: list(layer.active_adapters) for name, layer in _adapter_layers(self.module)}:
            own[_ADAPTERS] = active
        return own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Shared tensors are loaded with the model, before or after this."""
        own = {key: value for key, value in state.items() if key != _ADAPTERS}
        tensors = self.module.state_dict(keep_vars=True)
        for key in own.keys() & tensors.keys():
            if id(tensors[key]) in self._shared:
                self._separate(tensors[key])
        if unknown := self.module.load_state_dict(own, strict=False).unexpected_keys:
            raise ConfigError(
                f"this state is of the old model of another model: unknown tensors {', '.join(unknown[:3])}"
            )
        for name, layer in _adapter_layers(self.module):
            if name in state.get(_ADAPTERS, {}):
                layer.set_adapter(list(state[_ADAPTERS][name]), inference_mode=True)
        self._is_loaded = True  # the model may be loaded later: checksums are taken at the next use


def _frozen(module: nn.Module) -> Iterator[Tensor]:
    """Frozen parameters, and integer matrices among the buffers: the packed weights of quantised layers."""
    yield from (parameter for parameter in module.parameters() if not parameter.requires_grad)
    yield from (buffer for buffer in module.buffers() if buffer.dtype in _PACKED and buffer.ndim > 1)


def _adapter_layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Layers that peft wraps around others, recognised by class: peft's models forward unknown attributes inwards."""
    return [(name, layer) for name, layer in module.named_modules() if hasattr(type(layer), "adapter_layer_names")]


@dataclass
class _Shared:
    """A shared tensor, with version and checksum of when it was last compared."""

    tensor: Tensor
    version: int
    checksum: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Shared:
        """The tensor as it is now."""
        return cls(tensor, _version(tensor), _checksum(tensor))


def _version(tensor: Tensor) -> int:
    """A counter of the changes in place that autograd sees."""
    return 0 if tensor.is_inference() else tensor._version


def _checksum(tensor: Tensor) -> int | None:
    """The sum of the tensor's bits as integers, which does not depend on the order of summation.

    None for tensors that are not plain memory (sharded ones, some quantised ones): only their versions are compared.
    """
    if type(tensor.data) is not Tensor or tensor.device.type == "meta":
        return None
    bits = tensor.data.reshape(-1).view(_BITS.get(tensor.element_size(), torch.uint8))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(bits, _PIECE):
        total += piece.sum(dtype=torch.int64)
    return int(total)
