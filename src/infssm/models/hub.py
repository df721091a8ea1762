"""Language models of transformers by folder or name, called as our own are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from infssm._optional import require
from infssm.errors import CheckpointError

PREFIX = "hf:"
"""What names of transformers' models begin with in a configuration."""


def is_hub(name: str) -> bool:
    """Whether a model's name is that of one of transformers."""
    return name.startswith(PREFIX)


class HubModel(nn.Module):
    """A causal language model of transformers: ids [batch, tokens] -> next-token logits [batch, tokens, vocabulary].

    Args:
        model: made by transformers.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"language"})

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.num_classes = int(model.config.vocab_size)

    @property
    def lm_head(self) -> nn.Module:
        """The output layer."""
        layer: nn.Module = self.model.get_output_embeddings()
        return layer

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [batch, tokens]; mask: [batch, tokens], False where padded."""
        logits: Tensor = self.model(input_ids=x, attention_mask=mask, use_cache=False).logits
        return logits


def hub_model(name: str, *, weights: bool = True) -> HubModel:
    """The model of a folder written by ``save_pretrained``, or of a name on the hub; weights in safetensors only.

    ``weights=False`` leaves them as they are drawn, for a run that loads its own.
    """
    transformers: Any = require("transformers", install="pip install 'infssm[hf]'")
    place = str(Path(name.removeprefix(PREFIX)).expanduser())
    maker: Any = transformers.AutoModelForCausalLM
    try:
        config: Any = transformers.AutoConfig.from_pretrained(place)
        model = maker.from_pretrained(place, use_safetensors=True) if weights else maker.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"transformers cannot make a language model of {name!r}: {error}") from error
    return HubModel(model)
