"""Sequence models around a stack of Mamba-style mixers: encoder, classifier, language model.

Parameter names are those of state-spaces/mamba (``backbone.layers.N.mixer...``, ``lm_head``); checkpoints of
transformers' Mamba and Mamba2 load too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from infssm.errors import CheckpointError, ConfigError
from infssm.models.backbone import Backbone
from infssm.models.block import Block, RMSNorm, residual_projection_, run_blocks
from infssm.models.mixer import LayerState, SequenceState

Pooling = Literal["mean", "last"]


class SequenceEncoder(nn.Module):
    """Embedding, blocks, final norm: ids [batch, tokens] or values [batch, tokens, in_dim] -> [batch, tokens, dim].

    ``mixer`` is the class of the mixers, which ``options`` go to: ``mixer(d_model, **options)``.
    """

    def __init__(
        self,
        mixer: Callable[..., Any],
        *,
        d_model: int = 768,
        n_layer: int = 24,
        vocab_size: int = 50280,
        in_dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        mixers = [mixer(d_model, **options) for _ in range(n_layer)]
        for one in mixers:
            residual_projection_(one.out_proj.weight, n_layer)
        self.embedding: nn.Module
        if in_dim is None:
            embedding = nn.Embedding(vocab_size, d_model)
            nn.init.normal_(embedding.weight, std=0.02)
            self.embedding = embedding
        else:
            self.embedding = nn.Linear(in_dim, d_model)
        self.layers = nn.ModuleList(Block(d_model, mixer) for mixer in mixers)
        self.norm_f = RMSNorm(d_model)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run all blocks and the final norm on embedded tokens [batch, tokens, dim]; mask: [batch, tokens]."""
        return run_blocks(self.layers, self.norm_f, tokens, mask=mask)

    def initial_state(self, batch: int) -> tuple[LayerState, ...]:
        """The states of all layers before the first token of ``batch`` sequences."""
        blocks: list[Any] = list(self.layers)
        return tuple(block.mixer.initial_state(batch) for block in blocks)

    def advance(self, tokens: Tensor, states: tuple[LayerState, ...]) -> tuple[Tensor, tuple[LayerState, ...]]:
        """`forward` of embedded tokens [batch, tokens, dim] that continue a sequence, and the states after them."""
        hidden, residual, after = tokens, None, []
        for layer, state in zip(self.layers, states, strict=True):
            (hidden, state), residual = layer(hidden, residual, state=state)
            after.append(state)
        return self.norm_f(hidden, residual)[0], tuple(after)


class CausalBackbone(Backbone):
    """A model that reads a sequence from its first token to its last, at once or in chunks.

    ``pooling`` is what the head sees: the mean of all tokens, the last one, or (None) every token separately.
    """

    pooling: Pooling | None = "mean"

    @abstractmethod
    def mixers(self) -> list[Any]:
        """The mixers in their order; each has ``initial_state``."""

    @abstractmethod
    def encode(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run all blocks and the final norm: [batch, tokens, dim]; mask: [batch, tokens], False where padded."""

    @abstractmethod
    def advance(self, tokens: Tensor, states: tuple[LayerState, ...]) -> tuple[Tensor, tuple[LayerState, ...]]:
        """`encode` of tokens that continue a sequence, and the states after them."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        state: SequenceState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Logits; with ``return_state`` the pair of logits and state, from which the next chunk continues.

        Args:
            x: [batch, tokens, ...]; where there is a state, the tokens that follow those it was made from. A
                classifier's logits are then those of the whole sequence so far.
            mask: [batch, tokens], False where ``x`` is padded at the end: no state and no mean counts it. Not together
                with a state.
            state: from the call before; without it a sequence begins. Differentiable: ``state.detach()`` is where
                truncated back-propagation through time ends.
            return_state: whether to return the state after ``x``.
        """
        if state is None and not return_state:
            if mask is None:
                return super().forward(x)
            return self.head(self.pool(self.encode(self.embed(x), mask), mask))
        if mask is not None:
            raise ConfigError(
                "mask and state cannot be combined: padding would become part of the state. Pass sequences of one "
                "length, or each separately"
            )
        before = self.initial_state(len(x)) if state is None else state
        if x.shape[1] == 0 or len(x) != len(before.layers[0].hidden):
            raise ConfigError(
                f"x is {list(x.shape)}; with a state it must have at least one token, and the state's batch size of "
                f"{len(before.layers[0].hidden)}"
            )
        features, layers = self.advance(self.embed(x), before.layers)
        after = SequenceState(layers, before.total, before.tokens + x.shape[1])
        if before.total is None:
            pooled = self.pool(features)
        else:
            total = before.total + features.sum(dim=1, dtype=before.total.dtype)
            pooled, after = (total / after.tokens).to(features.dtype), replace(after, total=total)
        logits = self.head(pooled)
        return (logits, after) if return_state else logits

    def initial_state(self, batch: int) -> SequenceState:
        """The state before the first token of ``batch`` sequences."""
        layers = tuple(mixer.initial_state(batch) for mixer in self.mixers())
        if self.pooling != "mean":
            return SequenceState(layers)
        device = layers[0].hidden.device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        return SequenceState(layers, torch.zeros(batch, self.num_features, dtype=dtype, device=device))

    def pool(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean over tokens, or the last token: [batch, dim]; ``mask``: [batch, tokens], False where padded."""
        if self.pooling is None:
            return features
        if mask is None:
            return features.mean(dim=1) if self.pooling == "mean" else features[:, -1]
        if self.pooling == "last":
            return features[torch.arange(len(mask), device=mask.device), mask.sum(dim=1) - 1]
        kept = mask[..., None].to(features.dtype)
        return (features * kept).sum(dim=1) / kept.sum(dim=1)


class _SequenceBackbone(CausalBackbone):
    backbone: SequenceEncoder

    def embed(self, x: Tensor) -> Tensor:
        """Embed ids [batch, tokens] (or values [batch, tokens, in_dim]): [batch, tokens, dim]."""
        tokens: Tensor = self.backbone.embedding(x)
        return tokens

    def encode(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :class:`CausalBackbone`."""
        features: Tensor = self.backbone(tokens) if mask is None else self.backbone(tokens, mask)
        return features

    def mixers(self) -> list[Any]:
        """See :class:`CausalBackbone`."""
        return [layer.mixer for layer in self.backbone.layers]

    def advance(self, tokens: Tensor, states: tuple[LayerState, ...]) -> tuple[Tensor, tuple[LayerState, ...]]:
        """See :class:`CausalBackbone`."""
        return self.backbone.advance(tokens, states)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay must leave alone, besides all one-dimensional ones."""
        return {name for name, _ in self.named_parameters() if name.endswith("A_log")}

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take transformers' name of the embedding."""
        return {name.replace("backbone.embeddings.", "backbone.embedding."): value for name, value in state.items()}


class SequenceClassifier(_SequenceBackbone):
    """Pooled features of a sequence -> logits [batch, num_classes]; ``options`` are those of the encoder."""

    supported_data = frozenset({"series", "tokens", "regression"})

    def __init__(
        self, mixer: Callable[..., Any], *, num_classes: int = 1000, pooling: Pooling = "mean", **options: Any
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "last"):
            raise ConfigError(f"unknown pooling {pooling!r}; known: mean, last")
        self.backbone = SequenceEncoder(mixer, **options)
        self.num_features, self.num_classes, self.pooling = len(self.backbone.norm_f.weight), num_classes, pooling
        self.head = self.make_head(num_classes)

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leave out the output layer of a language model."""
        state = super().adapt_state_dict(state)
        return {name: value for name, value in state.items() if not name.startswith("lm_head.")}


class LanguageModel(_SequenceBackbone):
    """Ids [batch, tokens] -> next-token logits [batch, tokens, vocab_size]; output and embedding may share weights."""

    supported_data = frozenset({"language"})
    pooling = None

    def __init__(
        self, mixer: Callable[..., Any], *, vocab_size: int = 50280, tie_embeddings: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.backbone = SequenceEncoder(mixer, vocab_size=vocab_size, in_dim=None, **options)
        self.num_features, self.num_classes = len(self.backbone.norm_f.weight), vocab_size
        self.lm_head = nn.Linear(self.num_features, vocab_size, bias=False)
        self.tie_embeddings = tie_embeddings
        if tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight  # type: ignore[assignment]

    @property
    def head(self) -> nn.Linear:  # type: ignore[override]
        """The output layer."""
        return self.lm_head

    def reset_classifier(self, num_classes: int) -> None:
        """Refuse: the head is the vocabulary's."""
        raise ConfigError(f"a language model has no head of {num_classes} classes; create it with vocab_size instead")

    def saved_options(self) -> dict[str, Any]:
        """Options for ``create_model``."""
        return dict(self.model_options)

    def head_shape_differs(self, state: dict[str, Tensor]) -> bool:  # noqa: ARG002
        """Never: the vocabulary must fit."""
        return False

    def adapt_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fill in the tied output layer where a file stores it once; refuse one that is not tied."""
        state = super().adapt_state_dict(state)
        embedding = state.get("backbone.embedding.weight")
        if embedding is None or not self.tie_embeddings:
            return state
        if not torch.equal(state.setdefault("lm_head.weight", embedding), embedding):
            raise CheckpointError("lm_head and embedding of the checkpoint differ: create with tie_embeddings=False")
        return state
