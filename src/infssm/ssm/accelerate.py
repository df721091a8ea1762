"""transformers' mixers on our operations: subclasses a mixer's class is swapped for, and back."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.errors import ConfigError, NoSSMLayersError
from infssm.models import SSMMixer, StateRows
from infssm.models.mixer import beside_checkpoint
from infssm.ops import ScanInputs, scan, scan_ssd
from infssm.ssm.probes import transformers_mamba, transformers_mamba2
from infssm.ssm.probes.selective import convolve, masked, packing, raw_states, wide

_MAMBA = {
    "MambaMixer": "transformers.models.mamba.modeling_mamba",
    "FalconMambaMixer": "transformers.models.falcon_mamba.modeling_falcon_mamba",
    "JambaMambaMixer": "transformers.models.jamba.modeling_jamba",
}
_MAMBA2 = {
    "Mamba2Mixer": "transformers.models.mamba2.modeling_mamba2",
    "BambaMixer": "transformers.models.bamba.modeling_bamba",
    "GraniteMoeHybridMambaLayer": "transformers.models.granitemoehybrid.modeling_granitemoehybrid",
    "FalconH1Mixer": "transformers.models.falcon_h1.modeling_falcon_h1",
    "Zamba2MambaMixer": "transformers.models.zamba2.modeling_zamba2",
    "NemotronHMamba2Mixer": "transformers.models.nemotron_h.modeling_nemotron_h",
}
_CLASSES: dict[str, type[nn.Module]] = {}
M = TypeVar("M", bound=nn.Module)


class Fast(SSMMixer):
    """Base of the swapped-in classes; they come before the original class, whose forward serves cached generation."""

    original: ClassVar[type[nn.Module]]
    in_proj: Any
    out_proj: Any
    layer_idx: Any
    conv_kernel_size: Any

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """hidden_states: [batch, tokens, width] -> the same shape."""
        if cache_params is None or not cache_params.has_previous_state(self.layer_idx):
            seq_idx = packing(hidden_states, kwargs)
            if seq_idx is not None and cache_params is not None:
                raise ConfigError("a cache holds one sequence per row; call packed sequences with use_cache=False")
            mixed = self.mix(masked(hidden_states, attention_mask), attention_mask, seq_idx, cache_params)
            out: Tensor = self.out_proj(mixed.to(hidden_states.dtype))
            return out
        if self.tap is not None:
            raise ConfigError("states cannot be recorded while generating from a cache; call with use_cache=False")
        return super().forward(hidden_states, cache_params, attention_mask, **kwargs)  # type: ignore[no-any-return]

    @abstractmethod
    def mix(self, hidden: Tensor, mask: Tensor | None, seq_idx: Tensor | None, cache: Any) -> Tensor:
        """Everything before the output projection; hidden: [batch, tokens, width]. Fills an empty cache.

        mask, seq_idx: [batch, tokens] of padding and of packed sequences, or None.
        """

    def prefill(self, cache: Any, conv_input: Tensor, state: Tensor | None) -> None:
        """Leave the convolution's input [batch, tokens, channels] and the scan's last state in the cache."""
        cache.update_conv_state(conv_input.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        cache.update_recurrent_state(state, self.layer_idx)


class FastMamba(Fast):
    """Mamba, FalconMamba and Jamba."""

    D: Any

    def mix(self, hidden: Tensor, mask: Tensor | None, seq_idx: Tensor | None, cache: Any) -> Tensor:
        """One selective scan, gated."""
        x, z = self.in_proj(hidden).chunk(2, dim=-1)
        given = transformers_mamba.scan_inputs(self, x, mask, seq_idx)._replace(D=wide(self.D), z=wide(z))
        if cache is None:
            return self.run_scans([given], mask=mask)[0]
        if self.tap is not None:
            states = raw_states(given, include_dt_bias=self.tap.include_dt_bias, zoh=self.tap.zoh)
            self.emit([states._replace(mask=mask)])
        found = scan(given, last_state=True)
        self.prefill(cache, x, found.last_state)
        return found.y

    def state_parameters(self, which: str) -> list[StateRows]:
        """As the layer's probe says."""
        return transformers_mamba.parameters(self, which)


class FastMamba2(Fast):
    """Mamba2, Bamba, GraniteMoeHybrid, FalconH1, Zamba2 and NemotronH."""

    num_heads: Any
    head_dim: Any
    n_groups: Any
    ssm_state_size: Any
    intermediate_size: Any
    conv_dim: Any
    time_step_limit: Any
    activation: Any
    act: Any
    conv1d: Any
    A_log: Any
    dt_bias: Any
    D: Any
    norm: Any

    def mix(self, hidden: Tensor, mask: Tensor | None, seq_idx: Tensor | None, cache: Any) -> Tensor:
        """One scan with a scalar transition per head, gated and normalised."""
        gate, xbc, dt = self.project(hidden)
        act = self.activation if self.activation in ("silu", "swish") else self.act
        convolved = masked(convolve(self.conv1d, xbc, act=act, seq_idx=seq_idx), mask)
        x, bc = torch.split(convolved, [self.intermediate_size, self.conv_dim - self.intermediate_size], dim=-1)
        given = transformers_mamba2.head_inputs(bc, wide(dt), self.A_log, self.dt_bias, self.n_groups)
        if self.tap is not None:
            with beside_checkpoint():
                bias, zoh = self.tap.include_dt_bias, self.tap.zoh
                states = raw_states(given, include_dt_bias=bias, zoh=zoh, limit=self.time_step_limit)
                self.emit([states._replace(mask=mask)])
        delta = F.softplus(given.delta + wide(self.dt_bias)).clamp(*self.time_step_limit)
        heads = ScanInputs(x, delta, given.A[:, 0], given.B, given.C, wide(self.D), seq_idx=seq_idx)
        y, state, _ = scan_ssd(heads, last_state=cache is not None)
        if state is not None:
            self.prefill(cache, xbc, state.view(len(state), self.num_heads, self.head_dim, -1))
        mixed: Tensor = self.norm(y, gate) if getattr(self, "mamba_rms_norm", True) else y * F.silu(gate)
        return mixed

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Gate, input of the convolution, step sizes: [batch, tokens, ...]. FalconH1 scales input and output."""
        projected = self.in_proj(hidden * getattr(self, "ssm_in_multiplier", 1))
        if (scale := getattr(self, "mup_vector", None)) is not None:
            projected = projected * scale
        return torch.split(projected, [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)

    def state_parameters(self, which: str) -> list[StateRows]:
        """As the layer's probe says."""
        return transformers_mamba2.parameters(self, which)


def known() -> list[str]:
    """Names of the classes that have a fast subclass."""
    return [*_MAMBA, *_MAMBA2]


def fast_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The fast subclass of exactly this transformers class, or None (a user's own subclass is left alone)."""
    name = cls.__name__
    base = (
        FastMamba if _MAMBA.get(name) == cls.__module__ else FastMamba2 if _MAMBA2.get(name) == cls.__module__ else None
    )
    if base is None:
        return None
    if name not in _CLASSES:
        body = {
            "original": cls,
            "__module__": __name__,
            "__qualname__": f"Fast{name}",
            "__doc__": f"{name} on our scan.",
        }
        _CLASSES[name] = type(f"Fast{name}", (base, cls), body)
    return _CLASSES[name]


def __getattr__(name: str) -> Any:
    """Make ``Fast<Class>`` importable by name, so that accelerated models can be pickled."""
    original = name.removeprefix("Fast")
    module = _MAMBA.get(original) or _MAMBA2.get(original)
    if not name.startswith("Fast") or module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return fast_class(getattr(importlib.import_module(module), original))


def accelerate(model: M) -> M:
    """Run the model's Mamba, FalconMamba, Jamba and Mamba-2 style layers on our scan and convolution, in place.

    For CPUs, where transformers loops over the tokens in Python; on other devices keep its own kernels. Outputs are
    the same (to 1e-4), in training and inference; generation steps from a cache run the original code. Packed sequences
    (``seq_idx``, ``cu_seqlens``, ``position_ids`` that restart) stay apart in layers that are told of them. States are
    then recorded by the same scan. Parameters, ``state_dict``, ``save_pretrained`` and pickling are as before;
    :func:`restore` undoes it.
    """
    swapped = 0
    for module in model.modules():
        if (fast := fast_class(type(module))) is not None:
            module.__class__ = fast
            swapped += 1
    if not swapped and not any(isinstance(module, Fast) for module in model.modules()):
        raise NoSSMLayersError(
            f"{type(model).__name__} has no transformers layer to accelerate; known: {', '.join(known())}"
        )
    return model


def restore(model: M) -> M:
    """Undo :func:`accelerate`, in place."""
    for module in model.modules():
        if isinstance(module, Fast):
            module.__class__ = module.original  # type: ignore[assignment]
    return model


@contextmanager
def accelerated(model: M) -> Iterator[M]:
    """:func:`accelerate` for the block only."""
    accelerate(model)
    try:
        yield model
    finally:
        restore(model)
