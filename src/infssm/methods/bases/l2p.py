"""L2P-R: learned prompts, chosen per image from a pool, with replay.

On Vim prompts stand before all other tokens, so that a block carries image content to them through its backward scan
alone. Everything is trained except the class token and the copy of the backbone that computes the queries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods.bases.er import masked_cross_entropy
from infssm.methods.bases.wrapped import WrappedBackbone, pooled_features
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import BatchLike, Context, Loader, TaskInfo, Terms
from infssm.methods.core.passes import capture
from infssm.methods.replay.rehearsal import ReplayConfig, StreamReplay


class Selection(NamedTuple):
    """Prompts chosen for each image: ``tokens: [b, N·length, d]``, ``indices: [b, N]``.

    ``similarity: [b, N]`` of the query with the chosen keys; ``None`` if the indices were given.
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


class L2PRConfig(ReplayConfig):
    """Options of :class:`L2PR`."""

    buffer_size: int = Field(1000, gt=0, description="images kept; 1000, 2000 on CIFAR-100 (Tables 14-19)")
    pull: float = Field(0.1, ge=0, description="weight that pulls chosen keys to the query (Mammoth: 0.1, original: 1)")
    pool_size: int = Field(10, gt=0, description="prompts in the pool (Mammoth and original: 10; not in the paper)")
    length: int = Field(5, gt=0, description="tokens per prompt (Mammoth: 5, original: 10; not in the paper)")
    select: int = Field(5, gt=0, description="prompts per image (Mammoth: 5, original: 4; not in the paper)")
    mask: Literal["seen", "full"] = Field("seen", description="logits in the softmax: classes met so far, or all")

    @model_validator(mode="after")
    def _enough(self) -> L2PRConfig:
        if self.select > self.pool_size:
            raise ValueError(f"cannot select {self.select} prompts from a pool of {self.pool_size}")
        return self


@register_method
class L2PR(StreamReplay):
    """Learning to prompt, with replay: extra input tokens, chosen per image from a learned pool, distinguish tasks.

    ``CE - pull · mean over images of the sum of cos(query, chosen keys)``, with replay from the second task on.

    Paper: Wang et al., Learning to Prompt for Continual Learning, CVPR 2022, arXiv:2112.08654
    """

    name = "l2p-r"
    Config = L2PRConfig
    own_first_task = True
    config: L2PRConfig

    def __init__(self, config: L2PRConfig, context: Context) -> None:
        super().__init__(config, context)
        assert isinstance(context.module, PromptedModel)
        self.pool = context.module.prompt_pool

    @classmethod
    def prepare(cls, config: L2PRConfig, context: Context) -> nn.Module:
        """Wrap the model; its query copy is the model as it is now."""
        like = next(context.module.parameters())
        wrapped = PromptedModel(context.module, size=config.pool_size, length=config.length, select=config.select)
        wrapped.prompt_pool.to(like.device, like.dtype)
        return wrapped

    def columns(self, task: TaskInfo) -> slice:
        """The columns that the option ``mask`` selects."""
        return slice(None) if self.config.mask == "full" else slice(self.context.classes(self.name, task).stop)

    def loss(self, batch: BatchLike) -> Terms:
        """The terms ``ce`` and ``pull``."""
        x, y, current_rows = batch.x, batch.y, len(batch.y)
        if self.replays and self.context.current.index > 0:
            drawn = self.replay(current_rows)
            x, y = torch.cat((x, drawn.x)), torch.cat((y, self.to_device(drawn.entries["label"])))
        self.remember(**self.rows_of(batch))
        with capture(self.pool) as seen:
            logits = self.context.forward(x, current_rows=current_rows)
        selection: Selection = seen[0]
        # States are compared token by token, so the old model must be given the same prompts.
        self.context.old_forward_kwargs(indices=selection.indices[:current_rows])
        assert selection.similarity is not None
        classes = range(0) if self.config.mask == "full" else self.context.classes(self.name)
        ce = masked_cross_entropy(logits, y, current_rows=current_rows, classes=classes, mask=self.config.mask)
        return {"ce": ce, "pull": -self.config.pull * pull(selection.similarity)}

    def finish(self, task: TaskInfo, loader: Loader | None) -> None:
        """Refuse a first task that was not trained: there would be no prompts."""
        if not self.trained and task.index == 0:
            raise ConfigError("l2p-r must train task 0 itself, a checkpoint has no prompts: use train.task0=train")
        super().finish(task, loader)
