"""Shared by the replay bases: a buffer, and draws from it.

A step replays through one forward of the stream's and the buffer's images together: the backbones have no batch
statistics, so this equals the separate forwards of other implementations.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from infssm._processes import process_slice, this_share
from infssm.methods.core.contract import Base, BatchLike, ComponentConfig, Context, Loader, TaskInfo
from infssm.methods.core.passes import evaluating, require_loader
from infssm.methods.replay.buffers import Buffer, ReservoirBuffer


class ReplayConfig(ComponentConfig):
    """Options of every method with a buffer."""

    buffer_size: int = Field(1000, gt=0, description="images kept; Tables 14-19: 500 to 2000")
    replay_batch: int | None = Field(
        None, gt=0, description="images replayed per step; null: as many as the stream's batch (Mammoth)"
    )


class Replayed(NamedTuple):
    """One replay draw of this process: ``slots: [m]``, ``x: [m, ...]`` augmented, ``entries`` as stored."""

    slots: Tensor
    x: Tensor
    entries: dict[str, Tensor]


class Replay(Base):
    """A base with a buffer. Rows given to :meth:`remember` during a step enter it after the optimizer's step."""

    Config: ClassVar[type[ComponentConfig]] = ReplayConfig
    config: ReplayConfig
    saved: ClassVar[tuple[str, ...]] = ("buffer", "trained", "begun")
    stores_data = True
    needs_raw = True
    supports_soft_labels = False

    def __init__(self, config: ReplayConfig, context: Context) -> None:
        super().__init__(config, context)
        self.buffer: Buffer = self.make_buffer()
        self.trained = False
        """Whether this task has had a step: task 0 may come from a checkpoint and only be stored."""
        self.begun: int | None = None
        """Index of the task in training, so that a run that is resumed inside a task does not begin it again."""

    def make_buffer(self) -> Buffer:
        """Create the empty buffer."""
        return ReservoirBuffer(self.config.buffer_size, self.context.modality.stored_fields, seed=self.context.seed)

    def columns(self, task: TaskInfo) -> slice:  # noqa: ARG002
        """All columns, as in most reference implementations of replay."""
        return slice(None)

    def begin_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Start the task, unless it was begun before a run was resumed."""
        if self.begun == task.index:
            return
        self.begun, self.trained = task.index, False
        self.start(task, loader)

    def start(self, task: TaskInfo, loader: Loader | None) -> None:
        """Called when a task begins, once per task even if a run is resumed inside it."""

    def end_task(self, task: TaskInfo, loader: Loader | None) -> None:
        """Finish the task."""
        self.finish(task, loader)
        self.begun = None

    @abstractmethod
    def finish(self, task: TaskInfo, loader: Loader | None) -> None:
        """Called when a task ends."""

    @property
    def replays(self) -> bool:
        """Whether there is something to replay, for every process."""
        return len(self.buffer) >= this_share().world

    def replay(self, batch_size: int) -> Replayed:
        """Draw from the buffer for a stream batch of ``batch_size`` images per process; images freshly augmented."""
        slots = self.draw(self.replay_count(batch_size))
        entries = self.buffer.get(slots)
        return Replayed(slots, self.augmented(entries["image"]), entries)

    def augmented(self, images: Tensor) -> Tensor:
        """Stored images ``[m, channels, height, width]``, freshly augmented by draws of the buffer."""
        return self.context.augmented(images, self.buffer.fresh_generator())

    def replay_count(self, batch_size: int) -> int:
        """Entries replayed per step over all processes, for a stream batch of ``batch_size`` images on each."""
        return self.config.replay_batch or batch_size * this_share().world

    def draw(self, count: int) -> Tensor:
        """This process's share of about ``count`` drawn slots: ``[m]``; all processes draw the same.

        All get equally many, one or more: the mean over processes of a mean over images is then that over all images.
        """
        world = this_share().world
        slots = self.buffer.sample(max(count // world, 1) * world)
        return process_slice(slots[: len(slots) // world * world])

    def forget(self, label: int) -> None:
        """Drop the samples of a class."""
        self.buffer.forget(label)

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on the module's device."""
        return tensor.to(self.context.device)


class StreamReplay(Replay):
    """Replay from a reservoir that is offered every image of every step."""

    buffer: ReservoirBuffer

    def __init__(self, config: ReplayConfig, context: Context) -> None:
        super().__init__(config, context)
        self._pending: list[dict[str, Tensor]] = []

    def remember(self, **rows: Tensor) -> None:
        """Offer rows of this process to the reservoir once the step is done."""
        self.trained = True
        self._pending.append(rows)

    def after_step(self) -> None:
        """Offer what the step remembered."""
        for rows in self._pending:
            self.buffer.offer(**rows)
        self._pending = []

    def finish(self, task: TaskInfo, loader: Loader | None) -> None:  # noqa: ARG002
        """A task that was not trained (task 0 from a checkpoint) still fills the buffer, in one pass."""
        self._pending = []
        if self.trained:
            return
        with evaluating(self.context.module):
            for batch in require_loader(loader, self.name, "fills its buffer from the task's data"):
                self.buffer.offer(**self.rows_of(batch))

    def rows_of(self, batch: BatchLike) -> dict[str, Tensor]:
        """The entries to store of a batch that is not trained on."""
        return self.context.modality.rows(batch, self.name)
