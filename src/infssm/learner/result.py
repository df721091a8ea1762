"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.store.directory import RunDirectory


@dataclass(frozen=True)
class Result:
    """A complete run, read from its directory: its settings, and accuracy on every task after every task."""

    path: Path
    config: RunConfig
    matrix: AccuracyMatrix

    @classmethod
    def load(cls, path: Path | str) -> Result:
        """Read a complete run."""
        run = RunDirectory.open(path)
        run.result()
        return cls(run.path, load_config(run.config()), run.matrix())

    @property
    def aa(self) -> float:
        """Average accuracy after the last task."""
        return self.matrix.aa

    @property
    def aia(self) -> float:
        """Average incremental accuracy."""
        return self.matrix.aia

    @property
    def fm(self) -> float:
        """Forgetting measure, in the released code's form."""
        return self.matrix.fm()

    @property
    def report(self) -> Path:
        """The HTML report."""
        return RunDirectory(self.path).report_path

    @property
    def weights(self) -> Path:
        """Weights after the last task, as safetensors."""
        return RunDirectory(self.path).weights_path(self.matrix.num_tasks - 1)

    @cached_property
    def seconds(self) -> float:
        """Time the run took, evaluation included, interruptions not."""
        return float(RunDirectory(self.path).result()["seconds"])
