"""Which state space layers of a model are trained, and which of them an adapter (LoRA) misses."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import nn

from infssm.errors import ConfigError
from infssm.ssm.mixers import find_mixers, state_parameters

# Mixers of transformers and mamba_ssm read the weights of these layers directly, so an adapter around them never runs.
_READ_DIRECTLY = ("conv1d", "dt_proj")
_NOT_ADVISED = (*_READ_DIRECTLY, "out_proj")  # fused kernels read out_proj as well, so peft refuses it


class LayerCoverage(NamedTuple):
    """One state space layer.

    trained: names of its parameters that are trained, adapters included. forms_states: whether one of them is part of
    what forms the layer's A, B or C. ignored: names of adapters that the layer never calls.
    """

    trained: list[str]
    forms_states: bool
    ignored: list[str]


class Coverage(NamedTuple):
    """The state space layers of a model by name, and linear layers in them that an adapter could be put on."""

    layers: dict[str, LayerCoverage]
    targets: list[str]
    has_adapters: bool

    @property
    def missed(self) -> list[str]:
        """Names of the layers without a trained parameter."""
        return [name for name, layer in self.layers.items() if not layer.trained]

    def summary(self) -> str:
        """The trained layers in one or two sentences, and how to reach the rest."""
        trained = len(self.layers) - len(self.missed)
        text = f"{trained} of {len(self.layers)} state space layers have a trained parameter"
        held = sum(layer.forms_states for layer in self.layers.values())
        text += f", {held} one that forms their states (A, B, C)."
        if self.missed and self.has_adapters:
            text += f" The adapter misses {_few(self.missed)}; add target_modules={self.targets!r}."
        ignored = [f"{name}.{part}" for name, layer in self.layers.items() for part in layer.ignored]
        if ignored:
            text += (
                f" Adapters on {_few(ignored)} have no effect, because the layer reads that weight directly; put them "
                f"on {self.targets!r}."
            )
        return text


def coverage(model: nn.Module) -> Coverage:
    """Look at which parameters of the model's state space layers are trained (``requires_grad``)."""
    layers: dict[str, LayerCoverage] = {}
    targets: Counter[str] = Counter()
    adapters = False
    for name, mixer in find_mixers(model).items():
        trained = [key for key, parameter in mixer.named_parameters() if parameter.requires_grad]
        wrapped = [key for key, module in mixer.named_modules() if hasattr(type(module), "adapter_layer_names")]
        adapters = adapters or bool(wrapped)
        for key, module in mixer.named_children():
            if isinstance(module, nn.Linear) or key in wrapped:
                targets[key] += key not in _NOT_ADVISED
        forms = _forms_states(mixer)
        # The adapter of a layer that forms states is trained instead of its weight.
        reached = any(key in forms or key.split(".")[0] in {x.split(".")[0] for x in forms} for key in trained)
        layers[name] = LayerCoverage(trained, reached, [key for key in wrapped if key in _READ_DIRECTLY])
    return Coverage(layers, [key for key, count in targets.items() if count], adapters)


def _forms_states(mixer: nn.Module) -> set[str]:
    """Names of the parameters that form a mixer's states; empty if its probe does not name them."""
    try:
        return {name.replace(".base_layer", "") for name, _, _ in state_parameters(mixer, "ABC-full")}
    except ConfigError:
        return set()


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
