"""Which modules of a model are state space mixers, and which of their parameters form states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from infssm._registry import suggest
from infssm.errors import ConfigError, NoSSMLayersError
from infssm.models import STATE_SETS, SSMMixer
from infssm.ssm.probe import load_entry_points, probe_for, qualified_name

Layers = str | int | Sequence[str]

# Attributes under which DistributedDataParallel, torch.compile and FSDP keep the model they wrap.
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")
_WRAPPER_MODULES = (
    "torch.nn.parallel.",
    "torch._dynamo.",
    "torch.distributed.fsdp.",
    "lightning_fabric.",
    "lightning.",
)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, FSDP, torch.compile and Fabric wrappers."""
    while qualified_name(type(model)).startswith(_WRAPPER_MODULES):
        for name in _WRAPPED:
            if isinstance(inner := getattr(model, name, None), nn.Module):
                model = inner
                break
        else:
            return model
    return model


def find_mixers(model: nn.Module, layers: Layers = "all") -> dict[str, nn.Module]:
    """The state space mixers of a model by name, in order, names free of wrapper prefixes.

    ``layers``: ``"all"``, an int k for the last k mixers, or names. Raises NoSSMLayersError if there are none.
    """
    load_entry_points()
    found: dict[str, nn.Module] = {}
    _collect(model, "", found)
    if not found:
        types = Counter(qualified_name(type(module)) for module in model.modules())
        listing = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in types.most_common(20))
        raise NoSSMLayersError(
            f"{qualified_name(type(model))} has no state space layer that infssm knows. Module types found: {listing}"
            f"{', ...' if len(types) > 20 else ''}. Register yours with "
            "@infssm.register_probe(YourMixer) on a function (mixer, inputs) -> list[StateSpace]."
        )
    if layers == "all":
        return found
    if isinstance(layers, int):
        if not 1 <= layers <= len(found):
            raise ConfigError(
                f"layers={layers}, but the model has {len(found)} state space layers; use 1 to {len(found)}"
            )
        return dict(list(found.items())[-layers:])
    names = [layers] if isinstance(layers, str) else list(layers)
    if not names:
        raise ConfigError("layers is empty; name at least one layer, or use 'all'")
    for name in names:
        if name not in found:
            raise ConfigError(f"no state space layer {name!r}{suggest(name, found)}")
    return {name: mixer for name, mixer in found.items() if name in names}


def _collect(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    module = unwrap(module)
    if isinstance(module, SSMMixer) or probe_for(module) is not None:
        if not any(module is known for known in found.values()):
            found[prefix] = module
        return
    for name, child in module.named_children():
        _collect(child, f"{prefix}.{name}" if prefix else name, found)


def state_parameters(
    model: nn.Module, which: str, *, layers: Layers = "all"
) -> list[tuple[str, nn.Parameter, slice | None]]:
    """The parameters that form the states, as (name, parameter, row slice or None for all rows).

    ``which``: ``AC-direct``, ``ABC-direct`` or ``ABC-full``. A parameter with two row blocks appears twice.
    """
    if which not in STATE_SETS:
        raise ConfigError(f"unknown parameter set {which!r}{suggest(which, STATE_SETS)}")
    members: list[tuple[str, nn.Parameter, slice | None]] = []
    for prefix, mixer in find_mixers(model, layers).items():
        if isinstance(mixer, SSMMixer):
            listed = mixer.state_parameters(which)
        else:
            probe = probe_for(mixer)
            if probe is None or probe.parameters is None:
                raise ConfigError(
                    f"the probe of {prefix} ({qualified_name(type(mixer))}) does not list the parameters that form the "
                    "states; give register_probe(..., parameters=(mixer, which) -> [(parameter, rows)])"
                )
            listed = probe.parameters(mixer, which)
        own = {id(parameter): (name, parameter) for name, parameter in mixer.named_parameters()}
        for tensor, rows in listed:
            name, parameter = own[id(tensor)]
            members.append((f"{prefix}.{name}" if prefix else name, parameter, rows))
    return members
