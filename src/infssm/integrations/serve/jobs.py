"""The learner behind the server: one version that predicts, and one thread that makes the next."""

from __future__ import annotations

import copy
import secrets
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from infssm.errors import InfssmError
from infssm.learner import Learner
from infssm.learner.events import Control, Event, Listener, Note, StepDone
from infssm.learner.store.versions import Versions

_REMEMBERED = 200
"""Finished jobs that can still be asked about."""


class Job(BaseModel):
    """A change of the learner, carried out in the background."""

    id: str = Field(default_factory=lambda: secrets.token_urlsafe(12), description="Cannot be guessed.")
    kind: Literal["learn", "forget", "undo"]
    label: str | None = Field(default=None, description="The class that is taught or forgotten.")
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    progress: float | None = Field(default=None, description="From 0 to 1; null where it is not known.")
    message: str = Field(default="", description="What is being done, or why the job failed.")
    version: int | None = Field(default=None, description="The learner's version once the job is done.")


Change: TypeAlias = Callable[[Learner, Listener, Control], None]


class Service:
    """Holds the current learner and changes it by replacing it.

    A change is made on a learner of its own, opened from the folder; only when its new version is stored does it take
    the place of :attr:`learner`. A request that reads :attr:`learner` once therefore answers from one version, and a
    change that fails or is killed leaves no trace.

    Args:
        learner: opened from a folder.
        waiting: changes that may wait for the one in progress.
    """

    def __init__(self, learner: Learner, waiting: int) -> None:
        self.learner = learner
        self._waiting = waiting
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="infssm-change")
        self._control = Control()

    def refreshed(self) -> Learner:
        """The current learner, opened again where another process has changed the folder.

        While it makes a change itself, no other process can, so the folder need not be read.
        """
        folder = self.learner.folder
        if folder is not None and not self.unfinished:
            versions = Versions(Path(folder))
            if versions.exists and versions.current != self.learner.version:
                self.learner = Learner.load(folder)
        return self.learner

    def job(self, id: str) -> Job | None:
        """The job of an id, as it stands."""
        return self._jobs.get(id)

    @property
    def unfinished(self) -> list[Job]:
        """Jobs that run or wait, the oldest first."""
        return [job for job in list(self._jobs.values()) if job.state in ("waiting", "running")]

    def submit(self, job: Job, change: Change, done: Callable[[], None] = lambda: None) -> Job:
        """Queue a change of the learner; ``done`` is called when it ends in any way. Refused if too many wait."""
        if len(self.unfinished) > self._waiting:
            waiting = f"{self._waiting} changes are waiting: try again when some are done"
            raise HTTPException(429, waiting, {"retry-after": "5"})
        self._jobs[job.id] = job
        while len(self._jobs) > _REMEMBERED:
            self._jobs.popitem(last=False)
        self._worker.submit(self._carry_out, job, change, done)
        return job

    def _carry_out(self, job: Job, change: Change, done: Callable[[], None]) -> None:
        def listen(event: Event) -> None:
            if isinstance(event, StepDone):
                job.progress = event.epoch / event.epochs
            elif isinstance(event, Note):
                job.message = event.text

        job.state = "running"
        try:
            learner = copy.copy(self.learner)  # of one that knows nothing yet there is nothing to load
            if self.learner.folder is not None and self.learner.classes:
                learner = Learner.load(self.learner.folder)
            change(learner, listen, self._control)
            self.learner = learner
            job.version, job.progress, job.message = learner.version, 1.0, ""
            job.state = "done"
        except Exception as error:
            # An InfssmError is the user's to fix; anything else is a defect, named and survived.
            expected = isinstance(error, (InfssmError, OSError))
            job.message = str(error) if expected else f"{type(error).__name__}: {error}"
            job.state = "failed"
        finally:
            done()

    def close(self) -> None:
        """Ask the change in progress to stop, which leaves the version before it, and drop those that wait."""
        self._control.stop()
        self._worker.shutdown(cancel_futures=True)
