"""Copies of a model that share with it what does not train: beside a LoRA, a copy costs the LoRA's bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.ssm.adapters import merged_adapters

M = TypeVar("M", bound=nn.Module)

_PIECE = 1 << 20
"""Elements that a digest adds up at once: a sum of other integers in int64 makes a copy of them first."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_trained(module: M) -> M:
    """A copy of ``module`` with trained parameters and buffers of its own; it shares the frozen parameters.

    Integer matrices among the buffers are shared too: they are the packed weights of quantised layers.
    """
    return copy.deepcopy(module, {id(tensor): tensor for tensor in _frozen(module)})


def _frozen(module: nn.Module) -> Iterator[Tensor]:
    yield from (parameter for parameter in module.parameters() if not parameter.requires_grad)
    yield from (buffer for buffer in module.buffers() if buffer.dtype in _PACKED and buffer.ndim > 1)


_PACKED = (torch.uint8, torch.int8, torch.int16, torch.int32)


@dataclass
class _Seen:
    """A shared tensor as it was when it was last looked at."""

    tensor: Tensor
    version: int
    digest: int | None


class SharedTensors:
    """What a copy made by :func:`copy_trained` shares with its model, which must not change under the copy's feet."""

    def __init__(self, module: nn.Module, twin: nn.Module) -> None:
        self._twin = twin
        self._seen = {id(t): _Seen(t, _version(t), _digest(t)) for t in _frozen(module)}
        self._loading = False
        self._merged = merged_adapters(module)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._seen

    def changed(self) -> bool:
        """Whether any of them has other values than when it was shared, as after the merge of an adapter."""
        return any(_digest(seen.tensor) != seen.digest for seen in self._seen.values())

    def follow(self) -> None:
        """Give the copy its own of what trains by now. Cheap enough for every step: values are not read."""
        if self._loading:
            self._seen = {
                id(s.tensor): _Seen(s.tensor, _version(s.tensor), _digest(s.tensor)) for s in self._seen.values()
            }
            self._loading = False
        if any(layer.merged_adapters != merged for layer, merged in self._merged):
            # peft writes to weight.data, which autograd's version counter does not see.
            raise ConfigError(
                "an adapter was merged into weights that the old model shares, or unmerged from them, in the middle of "
                "a task: call merge_adapter() between end_task and begin_task, or unmerge_adapter() before training on"
            )
        for seen in list(self._seen.values()):
            if (version := _version(seen.tensor)) != seen.version:
                if _digest(seen.tensor) != seen.digest:
                    raise ConfigError(self._was_changed(seen.tensor))
                seen.version = version  # written with the same values, as by loading a checkpoint
            if seen.tensor.requires_grad:
                self.separate(seen.tensor)

    def loaded(self) -> None:
        """The copy was loaded; the model may be loaded after it, so what is shared counts from the next use."""
        self._loading = True

    def separate(self, tensor: Tensor) -> None:
        """Give the copy a tensor of its own in the place of a shared one."""
        own = nn.Parameter(tensor.detach().clone(), requires_grad=False)
        for name, parameter in list(self._twin.named_parameters(remove_duplicate=False)):
            if parameter is tensor:
                owner, _, leaf = name.rpartition(".")
                self._twin.get_submodule(owner)._parameters[leaf] = own
        del self._seen[id(tensor)]

    def _was_changed(self, tensor: Tensor) -> str:
        name = next((name for name, mine in self._twin.named_parameters() if mine is tensor), "a buffer")
        return (
            f"{name} was frozen when the last task ended, so the old model shares it, and was trained since then "
            "without penalty(x) of its first step: unfreeze parameters before end_task, or between begin_task and the "
            "first penalty"
        )


def _version(tensor: Tensor) -> int:
    """Grows with every change in place that autograd sees."""
    return 0 if tensor.is_inference() else tensor._version


def _digest(tensor: Tensor) -> int | None:
    """The sum of the tensor's bits as integers: whatever the order of adding, equal for equal values.

    ``None`` for tensors that are no plain memory (sharded ones, some quantised ones): their versions must do.
    """
    if type(tensor.data) is not Tensor or tensor.device.type == "meta":
        return None
    bits = tensor.data.reshape(-1).view(_BITS.get(tensor.element_size(), torch.uint8))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(bits, _PIECE):
        total += piece.sum(dtype=torch.int64)
    return int(total)
