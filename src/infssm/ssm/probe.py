"""Probes, which recompute the states of other libraries' mixers from the mixer's input, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from infssm._registry import load_plugins
from infssm.errors import ConfigError
from infssm.models import StateRows
from infssm.ssm.space import StateSpace

BMode = Literal["raw", "euler", "zoh"]


@dataclass(frozen=True)
class StateOptions:
    """How states are read.

    include_dt_bias: the step size with its bias, as in the scan; False leaves the bias out, as the released code does.
    b_mode: ``raw`` B as projected; ``euler`` B times the mean step; ``zoh`` mean of the zero-order hold of B.
    """

    include_dt_bias: bool = True
    b_mode: BMode = "raw"

    def __post_init__(self) -> None:
        if self.b_mode not in ("raw", "euler", "zoh"):
            raise ConfigError(f"b_mode={self.b_mode!r}; choose 'raw', 'euler' or 'zoh'")

    def b(self, b: Tensor, delta: Tensor, zoh: Tensor | None) -> Tensor:
        """B in the chosen mode. b, zoh: [..., n]; delta: [...]."""
        if self.b_mode == "raw":
            return b
        if self.b_mode == "euler":
            return b * delta.unsqueeze(-1)
        if zoh is None:
            raise ConfigError("this layer gives no zero-order hold factor; use b_mode='raw' or 'euler'")
        return b * zoh


@dataclass(frozen=True)
class MixerInputs:
    """The arguments of a mixer's call. ``inputs[0]`` and iteration give the positional ones."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: StateOptions = StateOptions()

    def __getitem__(self, index: int) -> Any:
        return self.args[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.args)

    def __len__(self) -> int:
        return len(self.args)

    def get(self, position: int, name: str) -> Any:
        """The argument at ``position``, or the keyword argument ``name``, or None."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)


def as_mask(mask: Tensor | None) -> Tensor | None:
    """A padding mask [batch, tokens] of any dtype as booleans; None if no token is padding."""
    if mask is None:
        return None
    tokens = mask.detach() != 0
    return None if bool(tokens.all()) else tokens


ProbeFn = Callable[[Any, MixerInputs], list[StateSpace]]
ParametersFn = Callable[[Any, str], list[StateRows]]


@dataclass(frozen=True)
class Probe:
    """How to read the states of one mixer class, and which parameters form them.

    exact: the systems give the layer's own response to an input while a token's values are held; otherwise they are
    means over channels. refusal: why a layer has no states to record, and what to use instead.
    """

    states: ProbeFn
    parameters: ParametersFn | None = None
    exact: bool = False
    refusal: str | None = None


_PROBES: dict[str, Probe] = {}
_GROUP = "infssm.probes"


def register_probe(
    *mixers: type[nn.Module] | str, parameters: ParametersFn | None = None, exact: bool = False
) -> Callable[[ProbeFn], ProbeFn]:
    """Register a probe for mixer classes: ``(mixer, inputs) -> list[StateSpace]``, one entry per scan direction.

    ``mixers``: classes, or their qualified names (``"package.module.Class"``; ``*`` matches anything) so that their
    library need not be imported. Subclasses are covered. ``inputs`` is a :class:`MixerInputs`; a probe must be
    differentiable.
    ``parameters``: ``(mixer, which) -> [(parameter, row slice or None)]`` for methods that regularize parameters.
    ``exact``: see :class:`Probe`; it is shown by ``infssm list probes``.
    Installed packages add probes through the entry-point group ``infssm.probes`` (name: qualified class name).
    """

    def add(fn: ProbeFn) -> ProbeFn:
        for mixer in mixers:
            name = mixer if isinstance(mixer, str) else qualified_name(mixer)
            known = _PROBES.get(name)
            if known is not None and _identity(known.states) != _identity(fn):
                raise ConfigError(f"a probe for {name!r} is registered already")
            _PROBES[name] = Probe(fn, parameters, exact)
        return fn

    return add


def refuse_layer(name: str, reason: str) -> None:
    """Name a mixer class whose states cannot be recorded: recording raises ConfigError with the reason."""

    def states(mixer: Any, inputs: MixerInputs) -> list[StateSpace]:  # noqa: ARG001
        raise ConfigError(reason)

    _PROBES[name] = Probe(states, refusal=reason)


def refuse_generation(is_generating: bool) -> None:
    """Refuse a step of cached generation, whose state before it a probe does not see."""
    if is_generating:
        raise ConfigError(
            "states cannot be recorded while generating from a cache; call the model with use_cache=False, or without "
            "inference_params"
        )


def check_options(inputs: MixerInputs, layer: str) -> None:
    """Refuse options of selective layers for a layer that has no step size."""
    if inputs.options.b_mode != "raw":
        raise ConfigError(f"{layer} has no step size for b_mode={inputs.options.b_mode!r}; use b_mode='raw'")
    if not inputs.options.include_dt_bias:
        raise ConfigError(f"{layer} cannot leave out the bias of its decay; use include_dt_bias=True")


def list_probes() -> dict[str, Probe]:
    """Every registered probe by the qualified name of its layer, those of installed packages included."""
    load_entry_points()
    return dict(sorted(_PROBES.items()))


def describe_probe(name: str) -> str:
    """One line: the systems that are recorded and whether they are exact, or why there are none."""
    probe = _PROBES[name]
    if probe.refusal is not None:
        return f"refused: {probe.refusal}"
    text = " ".join((probe.states.__doc__ or "").split("\n\n")[0].split()).removesuffix(".")
    return f"{text} ({'exact' if probe.exact else 'means over channels'})"


def probe_for(module: nn.Module) -> Probe | None:
    """The probe of the module's class or of the nearest of its bases, or None."""
    return next((found for cls in type(module).__mro__ if (found := probe_of(cls)) is not None), None)


def probe_of(cls: type) -> Probe | None:
    """The probe of exactly this class, or None."""
    name = qualified_name(cls)
    if name in _PROBES:
        return _PROBES[name]
    return next((found for key, found in _PROBES.items() if "*" in key and fnmatchcase(name, key)), None)


def load_entry_points() -> None:
    """Add the probes of installed packages; an entry point may be a probe function or a :class:`Probe`."""
    for name, loaded in load_plugins(_GROUP, _PROBES):
        _PROBES[name] = loaded if isinstance(loaded, Probe) else Probe(loaded)


def qualified_name(cls: type) -> str:
    """``package.module.Class``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _identity(fn: ProbeFn) -> tuple[str, str]:
    """Equal for the same source run twice (a notebook cell, a reloaded module)."""
    return getattr(fn, "__module__", ""), getattr(fn, "__qualname__", repr(fn))
