"""Self-replay: the old model generates sequences, on which the new one is held to it; no data are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from infssm._processes import process_slice, this_share
from infssm.errors import ConfigError
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import ComponentConfig, Context, Loader, ModelPair, Regularizer, TaskInfo, Terms
from infssm.methods.core.tasks import Input
from infssm.methods.regularizers.lwf import kl_divergence
from infssm.models.generate import generate, vocabulary_of
from infssm.models.sequence import LanguageModel

_AT_ONCE = 256
"""Sequences generated at a time: their states are in memory together. More at a time are not faster per sequence."""


class SelfReplayConfig(ComponentConfig):
    """Options of :class:`SelfReplay`."""

    weight: float = Field(
        2.0,
        ge=0,
        description="on KL(old ‖ new), mean over generated tokens; 0: only the other regularizers act on them",
    )
    growing: bool = Field(
        False,
        description="increase the weight in proportion to the number of tasks so far, from `weight` at the second one, "
        "so that each old domain keeps its share of the loss; for streams of more than three domains",
    )
    sequences: int = Field(768, gt=0, description="number of sequences that the old model generates when a task begins")
    replay_batch: int = Field(16, gt=0, description="generated sequences in every step, drawn at random")
    length: int = Field(128, ge=2, description="tokens per sequence; best the length of those in the data")
    cache: int = Field(
        256,
        ge=0,
        description="MiB for the old model's logits on all sequences, in half precision, computed once; where they "
        "do not fit, or more than logits is compared, the old model runs in every step",
    )
    refresh: int | None = Field(None, gt=0, description="steps after which new sequences are generated; null: never")
    prefixes: list[list[int]] | None = Field(
        None,
        min_length=1,
        description="token ids with which equal shares of the sequences begin, such as a prompt for each old domain; "
        "null: one random token",
    )

    @model_validator(mode="after")
    def _enough(self) -> SelfReplayConfig:
        if self.replay_batch > self.sequences:
            raise ValueError(f"replay_batch={self.replay_batch} is more than sequences={self.sequences}")
        for prefix in self.prefixes or []:
            if not 0 < len(prefix) < self.length:
                raise ValueError(
                    f"a prefix of {len(prefix)} tokens: expected at least 1, fewer than length={self.length}"
                )
        return self


@register_method
class SelfReplay(Regularizer):
    """A language model rehearses text that it generates: the old model's own text holds the old domains. No old data.

    ``weight · mean KL(softmax(old) ‖ softmax(new))`` over the tokens of ``replay_batch`` sequences in every step, of
    ``sequences`` that the old model generates when a task begins, from random first tokens or from ``prefixes``. Its
    logits on them are computed once, where they fit into ``cache``. The method's other regularizers compare old and
    new model on these sequences, too, instead of the new data.

    Paper: self-generated replay after arXiv:2605.26097, 2026
    """

    name = "self-replay"
    supported_data = frozenset({"language"})
    Config = SelfReplayConfig
    config: SelfReplayConfig
    needs_logits = True
    saved = ("generator", "begun", "steps", "sequences")

    def __init__(self, config: SelfReplayConfig, context: Context) -> None:
        super().__init__(config, context)
        known = vocabulary_of(context.module)  # refuses models that cannot generate
        if unknown := {token for prefix in config.prefixes or [] for token in prefix if not 0 <= token < known}:
            raise ConfigError(f"{self.name}.prefixes has {min(unknown)}, but the model's tokens are 0 to {known - 1}")
        self.sequences: Tensor | None = None
        """Sequences of the old model for the current task, int32 ``[sequences, length]``; gone when it ends."""
        self.logits: Tensor | None = None
        """The old model's on these sequences, float16 ``[sequences, length, vocabulary]``; None if not kept."""
        # Away from the seeds of the context's and of replay buffers' draws.
        self.generator = torch.Generator().manual_seed(2**33 + context.seed)
        self.begun: int | None = None
        self.steps = 0
        context.supply = self.draw

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Generate, unless the task was begun before a run was resumed."""
        if task.index > 0 and self.begun != task.index:
            self.begun, self.steps = task.index, 0
            self.generate()

    def after_step(self) -> None:
        """Generate anew every ``refresh`` steps."""
        self.steps += 1
        if self.sequences is not None and self.config.refresh and self.steps % self.config.refresh == 0:
            self.generate()

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Forget the sequences: the next task has those of the model as it is then."""
        self.sequences, self.logits, self.begun = None, None, None

    def generate(self) -> None:
        """Replace the sequences by new ones. All processes generate the same, so nothing has to be exchanged."""
        old = self.context.old
        assert old is not None
        old.follow()
        count, prefixes = self.config.sequences, self.config.prefixes
        if prefixes is None:
            starts = [torch.randint(vocabulary_of(old.module), (count, 1), generator=self.generator)]
        else:  # their shares differ by one sequence at most
            shares = [len(range(index, count, len(prefixes))) for index in range(len(prefixes))]
            starts = [torch.tensor([p]).expand(n, -1) for p, n in zip(prefixes, shares, strict=True) if n]
        parts = [
            generate(old.module, part, self.config.length - part.shape[1], generator=self.generator)
            for start in starts
            for part in torch.split(start, _AT_ONCE)
        ]
        self.sequences, self.logits = torch.cat(parts).to("cpu", torch.int32), None

    def draw(self) -> tuple[Input, Tensor | None]:
        """This process's share of the step's sequences, as model input; the old model's logits, if they are kept."""
        if self.sequences is None:
            raise ConfigError(f"{self.name} has generated nothing yet: call begin_task(task) before the first step")
        world = this_share().world
        chosen = torch.randperm(len(self.sequences), generator=self.generator)
        chosen = process_slice(chosen[: max(self.config.replay_batch // world, 1) * world])
        if self.logits is None and self._fits():
            self.logits = self._old_logits(self.sequences)
        known = None if self.logits is None else self.logits[chosen.to(self.logits.device)]
        return self._model_input(self.sequences[chosen]), known

    def _fits(self) -> bool:
        """Whether the logits of all sequences are worth keeping, and fit."""
        values = self.config.sequences * self.config.length * vocabulary_of(self.context.module)
        return self.context.compares_logits_alone and 2 * values <= self.config.cache * 2**20

    def _old_logits(self, sequences: Tensor) -> Tensor:
        """In batches of a step's size, so that the pass takes no more memory than a step."""
        old = self.context.old
        assert old is not None
        parts = []
        for part in torch.split(sequences, self.config.replay_batch):
            logits = old.observe(self._model_input(part), states=False, logits=True).logits
            assert logits is not None
            # The softmax does not change with the largest logit at 0, and float16 cannot overflow.
            parts.append((logits - logits.amax(dim=-1, keepdim=True)).clamp(min=-6e4).half())
        return torch.cat(parts)

    def _model_input(self, sequences: Tensor) -> Input:
        ids = sequences.to(self.context.device, torch.int64)
        own = any(isinstance(module, LanguageModel) for module in self.context.module.modules())
        return ids if own else {"input_ids": ids}

    def penalty(self, pair: ModelPair) -> Terms:
        """The term ``logits``."""
        assert pair.old.logits is not None
        assert pair.new.logits is not None
        if self.config.weight == 0:
            return {}
        old = pair.old.logits.to(pair.new.logits.dtype)  # may be kept in half precision
        return {"logits": self._weight() * kl_divergence(old, pair.new.logits, 1.0).mean()}

    def _weight(self) -> float:
        """The weight in the current task."""
        task = self.context.task
        assert task is not None
        return self.config.weight * ((task.index + 1) / 2 if self.config.growing else 1)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sequences of the task in training, and where the random numbers are."""
        super().load_state_dict({"sequences": None, **state})
        self.logits = None  # computed again by the old model, which is restored after this
