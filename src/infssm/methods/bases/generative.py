"""Generative: a model of the samples of each class that rehearses, before each task, what it generates itself."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from infssm._processes import gather_rows, process_slice, this_share
from infssm.errors import ConfigError, DataError
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import Base, BatchLike, ComponentConfig, Context, Loader, TaskInfo, Terms
from infssm.methods.core.passes import evaluating, require_loader
from infssm.methods.regularizers.lwf import kl_divergence
from infssm.models.generative import ClassLikelihood, GenerativeClassifier
from infssm.ssm import unwrap

_AT_ONCE = 256
"""Samples generated at a time: their states are in memory together."""


class GenerativeConfig(ComponentConfig):
    """Options of :class:`Generative`."""

    weight: float = Field(1.0, ge=0, description="on KL(old ‖ new) per generated value; 0 generates nothing")
    samples: int = Field(
        100, gt=0, description="samples that are generated of each known class when a task begins; gone when it ends"
    )


@register_method
class Generative(Base):
    """A model that generates what it classifies rehearses its own samples of the old classes. Nothing is stored.

    ``-mean log p(value | values before it, class) + weight · mean KL(old ‖ new)``, the second over as many generated
    samples as the batch has. Each known class generates ``samples`` of them before a task, so classes are balanced. The
    class under which a sample is most probable is the prediction. For models that generate classes
    (``mamba_generative_nano``).

    Paper: generative replay after Shin et al., NeurIPS 2017, arXiv:1705.08690, with one model that does both
    """

    name = "generative"
    Config = GenerativeConfig
    config: GenerativeConfig
    supported_data = frozenset({"images", "series"})
    supports_soft_labels = False
    own_first_task = True
    own_classifier = True
    why_no_regularizers = "generative compares old and new model on what it generates; leave regularizers out"
    saved = ("generator", "values", "labels", "old")

    def __init__(self, config: GenerativeConfig, context: Context) -> None:
        super().__init__(config, context)
        # Away from the seeds of the context's and of replay buffers' draws.
        self.generator = torch.Generator().manual_seed(2**34 + context.seed)
        self.values: Tensor | None = None
        """Generated for the current task, int16 ``[n, tokens]``; None when there is nothing to rehearse."""
        self.labels: Tensor | None = None
        """The class each was generated for, ``[n]``."""
        self.old: Tensor | None = None
        """The old model's log probabilities of them, ``[n, tokens, levels]``."""

    @classmethod
    def prepare(cls, config: Any, context: Context) -> nn.Module:  # noqa: ARG003
        """Refuse models that cannot generate."""
        if not isinstance(unwrap(context.module), GenerativeClassifier):
            raise ConfigError(
                f"{cls.name} needs a model that generates samples of a class, and {type(context.module).__name__} does "
                "not: use model.name=mamba_generative_nano or mamba2_generative_nano"
            )
        return context.module

    @property
    def model(self) -> GenerativeClassifier:
        """The model, without wrappers."""
        model = unwrap(self.context.module)
        assert isinstance(model, GenerativeClassifier)
        return model

    @property
    def likelihood(self) -> ClassLikelihood:
        """The classifier in training."""
        head = self.model.head
        assert isinstance(head, ClassLikelihood)
        return head

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Fit the range of values to the first task; generate before the others."""
        if task.index == 0:
            loader = require_loader(loader, self.name, "fits the range of its values to the first task's samples")
            self._fit_range(loader)
        elif self.config.weight > 0:
            block = task.past_classes
            if task.classes is None:
                block = slice(0, self.context.classes(self.name, task).start)
            self._generate(torch.arange(self.model.num_classes, device=self.context.device)[block])

    def _fit_range(self, loader: Loader) -> None:
        device, model = self.context.device, self.model
        model.fit_range((batch.x.to(device), getattr(batch, "mask", None)) for batch in loader)
        # Every process has seen its share.
        model.low, model.high = gather_rows(model.low[None]).amin(), gather_rows(model.high[None]).amax()
        if not model.low < model.high:
            raise DataError(f"{self.name}: all samples of the first task have the value {float(model.low):g}")

    def _generate(self, classes: Tensor) -> None:
        """Replace what is rehearsed. All processes generate the same, so nothing has to be exchanged."""
        labels = classes.repeat_interleave(self.config.samples)
        values, old = [], []
        with evaluating(self.model):
            for part in torch.split(labels, _AT_ONCE):
                drawn = self.likelihood.generate(part, self.generator)
                values.append(drawn.to("cpu", torch.int16))
                old.append(self.likelihood.log_probs(drawn, part).cpu())
        self.values, self.labels, self.old = torch.cat(values), labels.cpu(), torch.cat(old)

    def loss(self, batch: BatchLike) -> Terms:
        """The terms ``nll`` and, where there is something to rehearse, ``replay``; both per value."""
        values, labels = self.model.embed(batch.x, getattr(batch, "mask", None)), batch.y
        count = len(labels)
        if self.values is None or self.labels is None or self.old is None:
            return {"nll": _nll(self.likelihood.log_probs(values, labels), values)}
        world = this_share().world
        rows = process_slice(torch.randperm(len(self.values), generator=self.generator)[: count * world])
        drawn = self.values[rows].to(values)
        both = torch.cat((labels, self.labels[rows].to(labels)))
        found = self.likelihood.log_probs(torch.cat((values, drawn)), both)
        own, replayed = torch.split(found, [count, len(rows)])
        old = self.old[rows].to(replayed)
        return {
            "nll": _nll(own, values),
            "replay": self.config.weight * kl_divergence(old, replayed, 1.0).sum() / max(old[..., 0].numel(), 1),
        }

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """Forget the samples: the next task has those of the model as it is then."""
        self.values = self.labels = self.old = None


def _nll(log_probs: Tensor, values: Tensor) -> Tensor:
    """Mean negative log probability of ``values: [b, tokens]`` by ``log_probs: [b, tokens, levels]``."""
    return -log_probs.gather(-1, values.long()[..., None]).mean()
