"""Language models of transformers by folder or name, called as our own are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from infssm._optional import require
from infssm.errors import CheckpointError

PREFIX = "hf:"
"""Prefix of the names of transformers' models in a configuration."""

_MAX_COUNT = 100_000
_VALUES_PER_BYTE = 8
"""More values per byte of weights mean a damaged configuration: 4-bit weights have 2, with tied ones up to 4."""


class HubModel(nn.Module):
    """A causal language model of transformers: ids [batch, tokens] -> next-token logits [batch, tokens, vocabulary].

    Args:
        model: made by transformers.
    """

    supported_data: ClassVar[frozenset[str]] = frozenset({"language"})

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.num_classes = int(model.config.vocab_size)
        if not isinstance(model.get_output_embeddings(), nn.Module):
            raise CheckpointError(f"{type(model).__name__} has no output layer over the vocabulary")

    @property
    def lm_head(self) -> nn.Module:
        """The output layer."""
        layer: nn.Module = self.model.get_output_embeddings()
        return layer

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [batch, tokens]; mask: [batch, tokens], False where padded."""
        logits: Tensor = self.model(input_ids=x, attention_mask=mask, use_cache=False).logits
        return logits


def hub_model(name: str, *, weights: bool = True, trust_remote_code: bool = False) -> HubModel:
    """The model of a folder written by ``save_pretrained``, or of a name on the hub.

    Args:
        name: ``hf:`` and the folder or the name.
        weights: load the weights, from safetensors files only; False leaves them as they are drawn, for a run that
            loads its own.
        trust_remote_code: run Python code of the repository, for models that transformers itself does not know.
    """
    transformers: Any = require("transformers", install="pip install 'infssm[hf]'")
    place = Path(name.removeprefix(PREFIX)).expanduser()
    maker: Any = transformers.AutoModelForCausalLM
    trust = {"trust_remote_code": trust_remote_code}  # None would ask the user, and run the code after a "y"
    try:
        _check_counts(transformers.PreTrainedConfig.get_config_dict(str(place))[0])
        config: Any = transformers.AutoConfig.from_pretrained(str(place), **trust)
        stored = sum(file.stat().st_size for file in place.glob("*.safetensors")) if place.is_dir() else 0
        if stored:  # refuse a model far larger than the folder's weights, before memory for it is allocated
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in maker.from_config(config, **trust).parameters())
            if count > _VALUES_PER_BYTE * stored:
                raise CheckpointError(
                    f"config.json describes {count:,} parameters, and the weights are {stored:,} bytes"
                )
        if not weights:
            return HubModel(maker.from_config(config, **trust))
        model, info = maker.from_pretrained(str(place), use_safetensors=True, output_loading_info=True, **trust)
        found = HubModel(model)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from None
    except Exception as error:  # a damaged folder makes transformers raise errors of any kind
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if "trust_remote_code" in str(error) and not trust_remote_code:
            reason = "it needs Python code of its own; if you trust it, set model.options.trust_remote_code=true"
        raise CheckpointError(f"transformers cannot make a language model of {name!r}: {reason}") from error
    # Tensors that are tied to others are not among the missing keys.
    if lacking := [*sorted(info["missing_keys"]), *(str(key) for key in info["mismatched_keys"])]:
        listed = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        raise CheckpointError(
            f"the weights of {name!r} do not hold all of the model: {len(lacking)} tensors are missing or have another "
            f"shape ({listed}); download or save the model again"
        )
    return found


def _check_counts(config: dict[str, Any]) -> None:
    """Refuse numbers of layers or labels for which transformers would make lists that fill the memory."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, int | float) and ("layer" in key or "labels" in key) and value > _MAX_COUNT:
            raise CheckpointError(f"config.json has {key}={value}, which no model has")
