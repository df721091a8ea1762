"""The accuracy matrix of a run, filled one row per finished task, and the mean and spread over repeated runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infssm.errors import ConfigError, DataError
from infssm.learner.metrics.accuracies import (
    ACCURACY,
    BITS_PER_TOKEN,
    Accuracies,
    Matrix,
    Quantity,
    Summary,
    mean_or_nan,
    quantity_of,
)

_VALUE = "class_incremental"
_OTHERS = ("step", "task", "task_incremental", "samples", "num_tasks", "tokens")
"""Columns of the CSV; that of the values is called by the quantity, accuracy by :data:`_VALUE`."""
_UNREADABLE = (LookupError, StopIteration, TypeError, ValueError, MemoryError, ConfigError, DataError, csv.Error)
"""Exceptions that reading damaged files raises."""


class AccuracyMatrix(Accuracies):
    """Test accuracy on every task after every task, class-incremental and task-incremental.

    Accuracies are fractions in [0, 1]. The matrix itself is that of the class-incremental scenario, the primary one;
    ``task_incremental`` has the same measures of the other.

    Where tasks are domains, every task can be tested before its turn: the values ``ahead``, compared with those of
    guessing, give the forward transfer.

    Args:
        num_tasks: tasks in the stream.
        quantity: what the values are; accuracy, bits of language, or RMSE of regression.

    Of language, the values are bits per byte of the text, which different tokenizers can be compared by, and
    ``samples`` counts bytes. The matrix also holds the number of their tokens, which gives bits per token.
    """

    def __init__(self, num_tasks: int, quantity: Quantity = ACCURACY) -> None:
        if num_tasks < 1:
            raise ConfigError(f"an accuracy matrix needs at least one task, got {num_tasks}")
        super().__init__(np.full((num_tasks, num_tasks), np.nan), np.full(num_tasks, np.nan), quantity, steps=0)
        self.num_tasks = num_tasks
        self._inside = np.full((num_tasks, num_tasks), np.nan)
        self._tokens = np.full(num_tasks, np.nan)
        self._ahead = np.full((num_tasks + 1, num_tasks), np.nan)
        """Values of tasks before their turn; row 0 is what guessing reaches."""
        self._online = np.full(2, np.nan)
        """Right answers and samples of an online stream, each batch classified before it was trained on."""

    def update(
        self,
        accuracies: Sequence[float],
        task_accuracies: Sequence[float] | None = None,
        *,
        samples: Sequence[int] | None = None,
        ahead: Sequence[float] = (),
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Add the row of the task that has just been trained.

        Args:
            accuracies: [step + 1] class-incremental accuracies on tasks 0..step.
            task_accuracies: [step + 1] task-incremental accuracies; unknown when left out.
            samples: [step + 1] test images behind each value, for the image-weighted averages.
            ahead: [num_tasks - step - 1] values on tasks to come, where they can be tested.
            tokens: [step + 1] predicted tokens that stand for the ``samples`` bytes, where bits per byte are measured.
        """
        step, quantity = self.steps, self.quantity
        if step == self.num_tasks:
            raise ConfigError(f"the accuracy matrix holds all its {self.num_tasks} tasks already")
        given = {"accuracies": accuracies, "task_accuracies": task_accuracies, "samples": samples, "tokens": tokens}
        rows = {name: np.asarray(row, dtype=np.float64) for name, row in given.items() if row is not None}
        for name, row in rows.items():
            if row.shape != (step + 1,):
                raise ConfigError(
                    f"{name} after task {step} must hold {step + 1} values (tasks 0..{step}), got {row.shape}"
                )
            if name in ("samples", "tokens") and not (row > 0).all():
                raise ConfigError(f"{name} after task {step} must hold positive counts, got {row.tolist()}")
            if name not in ("samples", "tokens") and not all(map(quantity.allows, row.tolist())):
                limits = "fractions in [0, 1]" if quantity.top == 1 else "at least 0"
                raise ConfigError(f"{name} must be {limits}, got {row.tolist()}")
        unknown = np.full(step + 1, np.nan)
        self.values[step, : step + 1] = rows["accuracies"]
        self._inside[step, : step + 1] = rows.get("task_accuracies", unknown)
        self.samples[: step + 1] = rows.get("samples", self.samples[: step + 1])
        self._tokens[: step + 1] = rows.get("tokens", self._tokens[: step + 1])
        if len(ahead):
            self._ahead[step + 1, step + 1 :] = ahead
        self.steps += 1

    def add_online(self, right: int, samples: int) -> None:
        """Count a batch of an online stream that was classified before it is trained on."""
        self._online = np.nan_to_num(self._online) + np.array([right, samples])

    @property
    def online(self) -> float:
        """Accuracy along an online stream: the area under its curve over samples; NaN for other streams."""
        return float(self._online[0] / self._online[1])

    def begin(self, guess: float | Sequence[float]) -> None:
        """Tasks are domains, and ``guess`` is the value that guessing reaches on any, or on each, of them."""
        self._ahead[0] = guess

    @property
    def bits_per_token(self) -> float:
        """For language: mean over the tasks of the bits per token after the last step; NaN if unknown."""
        if self.quantity == BITS_PER_TOKEN:
            return self.aa
        if not self.steps:
            return math.nan
        seen = slice(self.steps)
        return float((self.values[self.steps - 1, seen] * (self.samples / self._tokens)[seen]).mean())

    @property
    def class_incremental(self) -> Accuracies:
        """Finished rows with the decision taken among all seen classes."""
        return Accuracies(self.finished.copy(), self.samples[: self.steps].copy(), self.quantity)

    @property
    def task_incremental(self) -> Accuracies:
        """Finished rows with the decision taken among the classes of the image's own task."""
        inside = self._inside[: self.steps, : self.steps].copy()
        return Accuracies(inside, self.samples[: self.steps].copy(), self.quantity)

    @property
    def fwt(self) -> float:
        """Forward transfer: mean gain over guessing of every later task, just before its turn."""
        before = np.diagonal(self._ahead[1:], 1)[: max(self.steps - 1, 0)]  # of task j + 1 after task j
        return mean_or_nan(self.quantity.sign * (before - self._ahead[0, 1 : len(before) + 1]))

    @property
    def of_domains(self) -> bool:
        """Whether tasks are domains, which can be tested before their turn."""
        return not np.isnan(self._ahead).all()

    @property
    def newest(self) -> float:
        """Mean over tasks of the value right after a task's own training."""
        return mean_or_nan(np.diagonal(self.values)[: self.steps])

    @property
    def all_values(self) -> Matrix:
        """Finished rows [steps, tasks] with the values of tasks before their turn where they are known, else NaN."""
        ahead = self._ahead[1 : self.steps + 1]
        return np.where(np.isnan(self.values[: self.steps]), ahead, self.values[: self.steps])

    def summary(self) -> dict[str, float]:
        """All scalar measures by name: those of the class-incremental scenario plain, the others as ``til_*``."""
        til = self.task_incremental
        return (
            {
                "aa": self.aa,
                "aia": self.aia,
                "fm": self.fm("code"),
                "fm_paper": self.fm("paper"),
                "bwt": self.bwt,
                "aa_weighted": self.weighted_aa,
                "aia_weighted": self.weighted_aia,
                "harmonic": self.harmonic,
                "til_aa": til.aa,
                "til_aia": til.aia,
                "til_fm": til.fm("code"),
                "til_bwt": til.bwt,
                **({"bits_per_token": self.bits_per_token} if self.quantity.unit == "bits" else {}),
            }
            | ({} if math.isnan(self.online) else {"online": self.online})
            | ({"fwt": self.fwt, "newest": self.newest} if self.of_domains else {})
        )

    def _stored(self) -> dict[str, Matrix]:
        """The arrays by their names in files; those that only some streams have are last."""
        always = {"class_incremental": self.values, "task_incremental": self._inside, "samples": self.samples}
        return always | {"tokens": self._tokens, "ahead": self._ahead, "online": self._online}

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``json.dump``; unknown entries are null."""
        values: dict[str, Any] = {"num_tasks": self.num_tasks, "steps": self.steps}
        if self.quantity != ACCURACY:
            values["measure"] = self.quantity.key
        for name, array in self._stored().items():
            unknown = np.isnan(array)
            if name not in ("tokens", "ahead", "online") or not unknown.all():
                values[name] = np.where(unknown, None, array).tolist()  # type: ignore[call-overload]
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AccuracyMatrix:
        """Rebuild what :meth:`to_json` wrote."""
        try:
            matrix = cls(int(data["num_tasks"]), quantity_of(data.get("measure", ACCURACY.key)))
            matrix.steps = int(data["steps"])
            for name, array in matrix._stored().items():
                if name in data or name not in ("tokens", "ahead", "online"):
                    array[:] = np.array(data[name], dtype=np.float64)
        except _UNREADABLE as error:
            raise DataError(f"this is not a stored accuracy matrix: {error!r}") from error
        return matrix

    def to_csv(self) -> str:
        """One line per known entry: step, task, both accuracies (empty when unknown), test images.

        For another quantity, its name takes the place of ``class_incremental``, and ``tokens`` follow last where they
        are known. Values of tasks before their turn come last; their step is that of the model, -1 for
        guessing.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        tokens = [] if np.isnan(self._tokens).all() else ["tokens"]
        value = _VALUE if self.quantity == ACCURACY else self.quantity.key
        writer.writerow(("step", "task", value, *_OTHERS[2:5], *tokens))

        def write(step: int, task: int, *cells: float) -> None:
            shown = ["" if math.isnan(cell) else repr(float(cell)) for cell in cells]
            writer.writerow((step, task, *shown[:3], self.num_tasks, *shown[3 : 3 + len(tokens)]))

        for step in range(self.steps):
            for task in range(step + 1):
                write(
                    step,
                    task,
                    self.values[step, task],
                    self._inside[step, task],
                    self.samples[task],
                    self._tokens[task],
                )
        for row, task in np.argwhere(~np.isnan(self._ahead)):
            write(row - 1, task, self._ahead[row, task], math.nan, math.nan, math.nan)
        return text.getvalue()

    @classmethod
    def from_csv(cls, source: str | Path) -> AccuracyMatrix:
        """Rebuild what :meth:`to_csv` wrote, from its text or from the file at a path."""
        text = source.read_text() if isinstance(source, Path) else source
        try:
            lines = list(csv.DictReader(io.StringIO(text)))
            key = next(name for name in lines[0] if name not in _OTHERS)
            matrix = cls(int(lines[0]["num_tasks"]), ACCURACY if key == _VALUE else quantity_of(key))
            places = [(int(line["step"]), int(line["task"])) for line in lines]
            matrix.steps = max((step + 1 for step, task in places if 0 <= task <= step), default=0)
            expected = [(step, task) for step in range(matrix.steps) for task in range(step + 1)]
            ahead = places[len(expected) :]
            if places[: len(expected)] != expected or not all(-1 <= step < task for step, task in ahead):
                raise ValueError("its lines are not one for each task after each task, in order")
            for (step, task), line in zip(places, lines, strict=True):
                if task > step:
                    matrix._ahead[step + 1, task] = float(line[key])
                    continue
                matrix.values[step, task] = float(line[key])
                matrix._inside[step, task] = float(line["task_incremental"] or "nan")
                matrix.samples[task] = float(line["samples"] or "nan")
                matrix._tokens[task] = float(line.get("tokens") or "nan")
        except _UNREADABLE as error:
            raise DataError(f"this is not a stored accuracy matrix: {error!r}") from error
        return matrix

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AccuracyMatrix) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if self.quantity != ACCURACY:
            return f"AccuracyMatrix(steps={self.steps}/{self.num_tasks}, {self.quantity.title} {self.aa:.4f})"
        return f"AccuracyMatrix(steps={self.steps}/{self.num_tasks}, aa={self.aa:.4f}, fm={self.fm():.4f})"


def summarize(results: Sequence[Mapping[str, float] | AccuracyMatrix]) -> dict[str, Summary]:
    """Mean and sample standard deviation of every measure over runs, usually one per seed.

    Args:
        results: accuracy matrices, or mappings from measure to value; all with the same measures.
    """
    if not results:
        raise ConfigError("nothing to summarize: pass at least one result")
    rows = [result.summary() if isinstance(result, AccuracyMatrix) else result for result in results]
    for row in rows[1:]:
        if row.keys() != rows[0].keys():
            differing = sorted(row.keys() ^ rows[0].keys())
            raise ConfigError(f"results must hold the same measures; these are not in all of them: {differing}")
    found = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        found[name] = Summary(float(np.mean(values)), std, len(values))
    return found
