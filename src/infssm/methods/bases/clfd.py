"""CLFD on experience replay: learn from frequency maps, let similar classes share features.

The encoder is trained on the first task and frozen from its last epoch on; the buffer holds its maps, not images. The
maps have half the image's size: a backbone with ``set_input_size`` (Vim) is resized, its position embeddings resampled
(224 pixels become 7×7 patches of 16, the 32 pixels of ``vim_nano`` 4×4 patches of 4). Where fewer than 4×4 patches
would be left, as with digits of 8 pixels, the maps are enlarged to the image's size instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from infssm._processes import sum_over_processes
from infssm.errors import ConfigError
from infssm.methods.bases.wrapped import (
    Encoded,
    FrequencyModel,
    first_probabilities,
    jitter_crop,
    later_probabilities,
    share_of,
)
from infssm.methods.core.build import register_method
from infssm.methods.core.contract import BatchLike, Context, Loader, TaskInfo, Terms
from infssm.methods.core.passes import capture, evaluating, require_loader
from infssm.methods.replay.buffers import ReservoirBuffer
from infssm.methods.replay.rehearsal import ReplayConfig, StreamReplay


class CLFDConfig(ReplayConfig):
    """Options of :class:`CLFD`; the paper gives only the buffer size."""

    capacity_factor: int = Field(
        4, ge=1, description="entries per image of buffer_size; a map of a quarter of the pixels (original: 4)"
    )
    ratio: float = Field(0.6, gt=0, le=1, description="share of features selected (original: 0.6)")
    warmup: float = Field(0.4, ge=0, le=1, description="share of epochs before counts set the probabilities (original)")
    adapt: Literal["auto", "native", "upsample"] = Field(
        "auto",
        description="'native': the backbone takes half-size maps; 'upsample': maps enlarged to image size; 'auto': "
        "native where that leaves 4x4 patches or more",
    )
    flip: bool = Field(True, description="flip replayed maps at random (original); off for digits and letters")


@register_method
class CLFD(StreamReplay):
    """Replays small frequency maps instead of images, and selects for each class the features it shares least.

    Cross-entropy of the stream, its features selected per class, plus cross-entropy of replayed maps.

    Paper: Liu et al., Continual Learning in the Frequency Domain, NeurIPS 2024, arXiv:2410.06645
    """

    name = "clfd"
    why_needs_total = "it counts the features that every class uses"
    Config = CLFDConfig
    own_first_task = True
    config: CLFDConfig
    needs_raw = False
    saved = (
        *StreamReplay.saved,
        *("counts", "new_counts", "probabilities", "appearance", "frozen", "images", "comparing", "ready"),
    )

    def __init__(self, config: CLFDConfig, context: Context) -> None:
        super().__init__(config, context)
        if context.num_classes is None:
            raise ConfigError("clfd counts features per class: give num_classes")
        self.frozen: dict[str, Tensor] | None = None
        """The encoder's final weights, once it has them."""
        self.images = 0
        self.comparing = False
        self.ready = False
        wrapped = context.module
        assert isinstance(wrapped, FrequencyModel)
        self.encoder, self.selection = wrapped.encoder, wrapped.selection
        shape = (context.num_classes, wrapped.num_features)
        height, width = wrapped.image_size
        channels = self.encoder.all.in_channels // 4
        self._blank = torch.zeros(1, channels, height, width, dtype=torch.uint8)
        self.counts, self.new_counts = torch.zeros(shape), torch.zeros(shape)
        self.probabilities = torch.zeros(shape)
        self.appearance = torch.zeros(shape[0], channels * (height // 2) * (width // 2))
        """Sum of the low bands of each class's images, by which classes are compared."""

    def make_buffer(self) -> ReservoirBuffer:
        """A reservoir of encoded maps."""
        capacity = self.config.capacity_factor * self.config.buffer_size
        return ReservoirBuffer(capacity, ("features", "label"), seed=self.context.seed)

    @classmethod
    def prepare(cls, config: CLFDConfig, context: Context) -> nn.Module:
        """Wrap the model between encoder and selection."""
        like = next(context.module.parameters())
        wrapped = FrequencyModel(context.module, ratio=config.ratio, adapt=config.adapt)
        wrapped.encoder.to(like.device, like.dtype)
        return wrapped

    def start(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """The encoder is fixed from the second task on."""
        self.ready = False
        self.encoder.requires_grad_(task.index == 0)

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Probabilities of the first epoch; in the last one of the first task the encoder becomes final."""
        classes, index = self.context.classes(self.name), self.context.current.index
        block = slice(classes.start, classes.stop)
        self.ready = True
        if epoch == 0 and index == 0:
            self.probabilities[block] = 0.0
            self.probabilities[block, : share_of(self.config.ratio, self.counts.shape[1])] = 1.0
        elif epoch == 0:
            self.probabilities[block] = self.config.ratio
        self.comparing = epoch == (epochs - 1 if index == 0 else 0)
        if self.comparing:
            self.appearance[block] = 0.0
        if self.comparing and index == 0:
            self.frozen = {k: v.detach().clone() for k, v in self.encoder.state_dict().items()}
            self.buffer.clear()

    def loss(self, batch: BatchLike) -> Terms:
        """The terms ``ce`` of the stream and ``replay``."""
        if not self.ready:
            raise ConfigError("clfd follows epochs: call method.begin_epoch(epoch, epochs) before the steps of each")
        current_rows, labels = len(batch.y), batch.y.cpu()
        maps, old_labels = self._replayed_maps(current_rows)
        # One uniform draw for all images: the features that each image's class may use in this step, [b, d].
        drawn = torch.rand(self.counts.shape[1], generator=self.buffer.fresh_generator(per_process=False))
        allowed = self.to_device(drawn < self.probabilities[labels])
        with capture(self.encoder) as encoded, capture(self.selection) as selected:
            logits = self.context.forward(batch.x, current_rows=current_rows, replayed=maps, allowed=allowed)
        self.context.old_forward_kwargs()
        self.new_counts.index_add_(0, labels, selected[0].mask[:current_rows].cpu().float())
        if self.comparing:
            self._add_appearance(encoded[0], labels)
        self.remember(features=encoded[0].features, label=batch.y)
        if self.context.current.index == 0:
            self.images += current_rows
        terms = {"ce": F.cross_entropy(logits[:current_rows], batch.y)}
        return terms if old_labels is None else terms | {"replay": F.cross_entropy(logits[current_rows:], old_labels)}

    def _replayed_maps(self, current_rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Stored maps and labels of one draw, cropped and flipped once the encoder is final."""
        if not self.replays:
            return None, None
        entries = self.buffer.get(self.draw(self.replay_count(current_rows)))
        maps = entries["features"]
        if self.frozen is not None:
            with torch.no_grad():
                blank = self.encoder(self.context.normalized(self._blank)).features[0, :, 0, 0]
            maps = jitter_crop(maps, blank.cpu().float(), self.buffer.fresh_generator(), flip=self.config.flip)
        return self.to_device(maps).to(next(self.encoder.parameters()).dtype), self.to_device(entries["label"])

    def after_step(self) -> None:
        """Offer the maps; once the encoder is final, undo what the optimizer did to it."""
        super().after_step()
        if self.frozen is not None and self.context.current.index == 0:
            self.encoder.load_state_dict(self.frozen)

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Probabilities from how similar the classes are, later from what was selected."""
        self.ready = False
        self.counts += sum_over_processes([self.new_counts])[0]
        self.new_counts.zero_()
        if self.comparing:
            self._compare()
        if epoch + 1 > self.config.warmup * epochs:
            counted = self.counts.amax(dim=1) > 0
            self.probabilities[counted] = later_probabilities(self.counts[counted])

    def _compare(self) -> None:
        self.comparing = False
        classes = self.context.classes(self.name)
        block = slice(classes.start, classes.stop)
        self.appearance[block] = sum_over_processes([self.appearance[block]])[0]
        if classes.start == 0:
            return
        appearance = F.normalize(self.appearance, dim=1)
        for label in classes:
            similarity = appearance[: classes.start] @ appearance[label]
            self.probabilities[label] = first_probabilities(similarity, self.counts[: classes.start])

    def finish(self, task: TaskInfo, loader: Loader | None) -> None:
        """After the first task: buffer and encoder agree, and the reservoir has seen all of its images."""
        self._pending = []
        if not self.trained and task.index == 0:
            raise ConfigError("clfd must train task 0 itself, a checkpoint has no encoder: use train.task0=train")
        if task.index == 0:
            self._settle(loader)
            self.buffer.seen = max(self.buffer.seen, int(sum_over_processes([torch.tensor(self.images)])[0]))

    def _settle(self, loader: Loader | None) -> None:
        """Where an earlier epoch was the best, its encoder is final: fill buffer and appearances again with it."""
        final = self.encoder.state_dict()
        if self.frozen is not None:
            if all(torch.equal(final[key], value) for key, value in self.frozen.items()):
                return
            if loader is None:
                self.encoder.load_state_dict(self.frozen)
                return
        loader = require_loader(loader, self.name, "fills its buffer with the encoder of the best epoch")
        self.frozen = {key: value.detach().clone() for key, value in final.items()}
        self.buffer.clear()
        self.appearance.zero_()
        with evaluating(self.context.module):
            for batch in loader:
                encoded: Encoded = self.encoder(self.to_device(batch.x))
                self._add_appearance(encoded, batch.y.cpu())
                self.buffer.offer(features=encoded.features, label=batch.y)
        self.appearance = sum_over_processes([self.appearance])[0]

    def _add_appearance(self, encoded: Encoded, labels: Tensor) -> None:
        self.appearance.index_add_(0, labels, encoded.ll.detach().flatten(1).cpu().float())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore buffer, counts, probabilities, appearances and the final encoder, which is frozen."""
        super().load_state_dict(state)
        if self.context.task is not None:
            self.encoder.requires_grad_(self.context.task.index == 0)
