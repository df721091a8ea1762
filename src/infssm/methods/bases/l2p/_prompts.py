"""A pool of prompts with keys, and a backbone that classifies from the prompts it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infssm.methods.bases.wrapped import WrappedBackbone, pooled_features


class Selection(NamedTuple):
    """Prompts chosen for each image: ``tokens: [b, N·length, d]``, ``indices: [b, N]``.

    ``similarity: [b, N]`` of the query with the chosen keys; ``None`` where the indices were given.
    """

    tokens: Tensor
    indices: Tensor
    similarity: Tensor | None


class PromptPool(nn.Module):
    """``size`` prompts of ``length`` tokens with a key each, all drawn from U(-1, 1)."""

    def __init__(self, size: int, length: int, dim: int, select: int) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.empty(size, length, dim).uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(size, dim).uniform_(-1, 1))
        self.select = select

    def forward(self, query: Tensor | None, indices: Tensor | None = None) -> Selection:
        """Prompts of the keys most similar to ``query: [b, d]``, or those at ``indices: [b, N]``."""
        chosen = None
        if indices is None:
            assert query is not None
            similarity = cosine_similarity(query, self.keys)
            chosen, indices = similarity.topk(self.select, dim=1)
        return Selection(self.prompts[indices].flatten(1, 2), indices, chosen)


def cosine_similarity(queries: Tensor, keys: Tensor) -> Tensor:
    """Cosines ``[b, P]`` of ``queries: [b, d]`` and ``keys: [P, d]``."""
    return F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T


def pull(similarity: Tensor) -> Tensor:
    """Sum over the chosen keys, mean over images, of their similarity with the query ``[b, N]``."""
    return similarity.sum(dim=1).mean()


class _Frozen:
    """Hides a frozen module from its owner, which shows no parameters or mixers of it; copies of the owner share it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frozen:
        return self


class PromptedModel(WrappedBackbone):
    """A backbone whose classifier sees the mean of its prompts' outputs.

    Selected prompts come before all tokens of the image; the class token stays where it was among these, frozen. The
    query is the pooled feature of a frozen copy of the backbone as it is given here, without prompts.
    """

    def __init__(self, model: nn.Module, *, size: int, length: int, select: int) -> None:
        super().__init__(model, "l2p-r")
        self._query = _Frozen(copy.deepcopy(model))
        self.prompt_pool = PromptPool(size, length, self.num_features, select)
        if isinstance(token := getattr(model, "cls_token", None), nn.Parameter):
            token.requires_grad_(False)

    def forward(self, x: Tensor, *, indices: Tensor | None = None) -> Tensor:
        """Images ``[b, ...]`` to logits ``[b, K]``; ``indices: [b, N]`` choose the prompts instead of the query."""
        selection: Selection = self.prompt_pool(None if indices is not None else self.query(x), indices)
        tokens = torch.cat((selection.tokens, self.model.embed(x)), dim=1)
        outputs = self.model.encode(tokens)
        return self.classify(outputs[:, : selection.tokens.shape[1]].mean(dim=1))

    @torch.no_grad()
    def query(self, x: Tensor) -> Tensor:
        """Pooled features ``[b, d]`` of the frozen copy."""
        return pooled_features(self._query.module, x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PromptedModel:
        self._query.module._apply(fn)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._query.module.state_dict(destination=destination, prefix=f"{prefix}query.", keep_vars=keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}query."
        saved = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(start)}
        if saved:
            self._query.module.load_state_dict({key.removeprefix(start): value for key, value in saved.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)
