"""`Experiment`: one run with every setting decided before it is hashed.

Settings are taken, in order of precedence, from: 1. the command line, 2. a config file, 3. a preset (of a benchmark, or
the one that fits the data), 4. the defaults of :class:`~infssm.learner.config.fields.RunConfig`. What is still open is
then decided for this machine (:func:`resolve`). The result is stored in ``config.yaml``, and nothing changes it
afterwards: the same settings have the same hash and give the same weights, alone or in a grid, on one process or many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import config_hash, flatten, to_dict
from infssm.learner.config.resolve import resolve, task0_config
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.layout import TASK0


@dataclass(frozen=True, eq=False)
class Experiment:
    """One run to carry out. Compared by identity (``eq=False``): its settings hold dictionaries and cannot be hashed.

    Attributes:
        config: all settings; see :func:`resolve`.
        label: what distinguishes it from the other experiments of its plan; empty: method and seed.
        task0_only: whether it ends with the model after task 0, which other experiments start from.
    """

    config: RunConfig
    label: str = ""
    task0_only: bool = False

    @classmethod
    def of(cls, config: RunConfig | Experiment) -> Experiment:
        """The experiment of a configuration, whose open settings are decided for this machine."""
        return config if isinstance(config, Experiment) else cls(resolve(config))

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.label or f"{self.config.method.name} seed {self.config.seed}"

    @cached_property
    def path(self) -> Path:
        """Its folder, ``<out>/<benchmark>/<method>/<model>/seed<k>-<hash>``; of task 0 ``.../task0/seed<k>-<hash>``."""
        config = self.config
        name = f"seed{config.seed}-{config_hash(config)}"
        benchmark = Path(config.out).expanduser() / config.benchmark_name
        if self.task0_only:
            return benchmark / TASK0 / name
        return benchmark / config.method.name / config.model.name.rstrip("/").split("/")[-1] / name

    @cached_property
    def task0(self) -> Experiment | None:
        """The experiment that makes the task-0 model this one starts from; None if it needs none.

        It has plain training for its method, and of the settings of ``train`` only those that act on task 0, so all
        experiments that agree in these have the same one. It reads no test data.
        """
        if self.config.train.task0 != "plain":
            return None
        return Experiment(task0_config(self.config), f"task 0 seed {self.config.seed}", task0_only=True)

    @property
    def task0_weights(self) -> Path | None:
        """Where the model it starts from is, or will be."""
        return None if self.task0 is None else RunDirectory(self.task0.path).weights_path(0)


def make_plan(configs: Iterable[RunConfig]) -> list[Experiment]:
    """Experiments of configurations; duplicates (equal path) are dropped."""
    by_path = {experiment.path: experiment for experiment in map(Experiment.of, configs)}
    settings = [experiment.config for experiment in by_path.values()]
    return [Experiment(config, label) for config, label in zip(settings, _labels(settings), strict=True)]


def _labels(configs: list[RunConfig]) -> list[str]:
    """Method and seed of each, and the settings in which those of one method differ; linear in the number of runs."""
    all_values = [dict(flatten(to_dict(config))) for config in configs]
    runs = Counter(config.method.name for config in configs)
    alike = Counter(
        (config.method.name, key, str(value))
        for config, values in zip(configs, all_values, strict=True)
        for key, value in values.items()
    )
    labels = []
    for config, values in zip(configs, all_values, strict=True):
        name = config.method.name
        # A setting is shown unless all runs of the method share its value.
        shown = [f"{k}={v}" for k, v in values.items() if k != "seed" and alike[name, k, str(v)] < runs[name]]
        labels.append(" ".join([f"{name} seed {config.seed}", *shown]))
    return labels
