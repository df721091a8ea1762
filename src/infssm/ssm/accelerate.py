"""Mamba mixers of transformers and MambaVision on our operations: `accelerate` swaps in a subclass with our forward."""

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
from infssm.models.mixer import at_least_float32, beside_checkpoint
from infssm.ops import ScanInputs, scan, scan_ssd
from infssm.ssm.probe import ProbeFn, list_probes, probe_of
from infssm.ssm.probes import mamba, mamba2
from infssm.ssm.probes.selective import activation, convolve, masked, packing, raw_states

M = TypeVar("M", bound=nn.Module)


class Fast(SSMMixer):
    """Base of the subclasses. Its forward precedes the original class's, which runs the steps of cached generation."""

    original: ClassVar[type[nn.Module]]
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

    def report(
        self, scanned: ScanInputs, inputs: ScanInputs, mask: Tensor | None, **limit: tuple[float, float]
    ) -> None:
        """Hand the scan to those who watch it, and the states of its inputs to a recorder."""
        if self.scan_hook is not None:
            self.scan_hook(scanned)
        if self.tap is not None:
            with beside_checkpoint():
                states = raw_states(inputs, include_dt_bias=self.tap.include_dt_bias, zoh=self.tap.zoh, **limit)
                self.emit([states._replace(mask=mask)])

    def state_parameters(self, which: str) -> list[StateRows]:
        """The parameters that the layer's probe names."""
        probe = probe_of(self.original)
        assert probe is not None
        assert probe.parameters is not None
        return probe.parameters(self, which)


class FastMamba(Fast):
    """Mamba, FalconMamba and Jamba."""

    def mix(self, hidden: Tensor, mask: Tensor | None, seq_idx: Tensor | None, cache: Any) -> Tensor:
        """One selective scan, gated."""
        mixer: Any = self
        x, z = mixer.in_proj(hidden).chunk(2, dim=-1)
        inputs = mamba.transformers_scan(self, x, mask, seq_idx)
        inputs = inputs._replace(D=at_least_float32(mixer.D), z=at_least_float32(z))
        if cache is None:
            return self.run_scans([inputs], mask=mask)[0]
        self.report(inputs, inputs, mask)
        found = scan(inputs, last_state=True)
        self.prefill(cache, x, found.last_state)
        return found.y


class FastMamba2(Fast):
    """Mamba2, Bamba, GraniteMoeHybrid, FalconH1, Zamba2 and NemotronH."""

    def mix(self, hidden: Tensor, mask: Tensor | None, seq_idx: Tensor | None, cache: Any) -> Tensor:
        """One scan with a scalar transition per head, gated and normalised."""
        mixer: Any = self
        # FalconH1 scales the input and the output of the projection.
        projected = mixer.in_proj(hidden * getattr(mixer, "ssm_in_multiplier", 1))
        if (scale := getattr(mixer, "mup_vector", None)) is not None:
            projected = projected * scale
        gate, xbc, dt = torch.split(projected, [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
        convolved = masked(convolve(mixer.conv1d, xbc, act=activation(mixer), seq_idx=seq_idx), mask)
        x, bc = torch.split(convolved, [mixer.intermediate_size, mixer.conv_dim - mixer.intermediate_size], dim=-1)
        inputs = mamba2.scan_inputs(mixer, bc, at_least_float32(dt))
        delta = F.softplus(inputs.delta + at_least_float32(mixer.dt_bias)).clamp(*mixer.time_step_limit)
        D = at_least_float32(mixer.D)
        scanned = ScanInputs(x, delta, inputs.A[:, 0], inputs.B, inputs.C, D, seq_idx=seq_idx)
        self.report(scanned, inputs, mask, limit=mixer.time_step_limit)
        y, state, _ = scan_ssd(scanned, last_state=cache is not None)
        if state is not None:
            self.prefill(cache, xbc, state.view(len(state), mixer.num_heads, mixer.head_dim, -1))
        mixed: Tensor = mixer.norm(y, gate) if getattr(mixer, "mamba_rms_norm", True) else y * F.silu(gate)
        return mixed


class FastMambaVision(Fast):
    """MambaVision's mixer, whose published forward needs a GPU."""

    def mix(self, hidden: Tensor, mask: Tensor | None, seq_idx: Tensor | None, cache: Any) -> Tensor:  # noqa: ARG002
        """One selective scan; the other half of the channels passes beside it."""
        mixer: Any = self
        x, z = mixer.in_proj(hidden).chunk(2, dim=-1)
        inputs = mamba.mambavision_scan(self, x)._replace(D=at_least_float32(mixer.D))
        return torch.cat([self.run_scans([inputs])[0], mamba.same_convolution(mixer.conv1d_z, z)], dim=-1)


_BASES: dict[ProbeFn, type[Fast]] = {
    mamba.transformers: FastMamba,
    mamba2.transformers: FastMamba2,
    mamba.mambavision: FastMambaVision,
}
"""The base for all layers that a probe reads."""
_MADE: dict[type[nn.Module], type[nn.Module]] = {}


def fast_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The fast subclass of exactly this class, or None (a user's own subclass is left alone)."""
    if cls not in _MADE:
        probe = probe_of(cls)
        if probe is None or probe.states not in _BASES:
            return None
        body = {"original": cls, "__module__": __name__, "__doc__": f"{cls.__name__} on our scan."}
        _MADE[cls] = type(f"Fast{cls.__name__}", (_BASES[probe.states], cls), body)
    return _MADE[cls]


def _known() -> dict[str, str]:
    """Class and module of the layers that have a fast subclass."""
    names = [name.rpartition(".") for name, probe in list_probes().items() if probe.states in _BASES]
    return {cls: module for module, _, cls in names}


def __getattr__(name: str) -> Any:
    """Make ``Fast<Class>`` importable by name, so that accelerated models can be pickled."""
    original = name.removeprefix("Fast")
    module = _known().get(original) if name.startswith("Fast") else None
    if module is None or "*" in module:  # MambaVision's module has a name of its own for every set of weights
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return fast_class(getattr(importlib.import_module(module), original))


def accelerate(model: M) -> M:
    """Run the model's Mamba, FalconMamba, Jamba, Mamba-2 style and MambaVision layers on our scan, in place.

    For CPUs, where transformers loops over the tokens in Python; on other devices keep its own kernels. Outputs are
    the same (to 1e-4), in training and inference; generation steps from a cache run the original code. Packed sequences
    (``seq_idx``, ``cu_seqlens``, ``position_ids`` that restart) stay apart in layers that receive them. States are
    then recorded by the same scan. Parameters, ``state_dict`` and ``save_pretrained`` are as before, and all but
    MambaVision can be pickled; :func:`restore` undoes it.
    """
    swapped = 0
    for module in model.modules():
        if (fast := fast_class(type(module))) is not None:
            module.__class__ = fast
            swapped += 1
    if not swapped and not any(isinstance(module, Fast) for module in model.modules()):
        raise NoSSMLayersError(f"{type(model).__name__} has no layer to accelerate; known: {', '.join(_known())}")
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
