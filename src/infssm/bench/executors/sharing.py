"""Which runs can share a task-0 model, and which of them trains it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from infssm.bench.executors.job import Job
from infssm.bench.running import run_path
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import to_dict
from infssm.learner.optim.schedule import task_lr
from infssm.learner.store.settings import counting, flatten
from infssm.methods import parse_name

_LATER = ("train.epochs", "train.lr", "train.lr_scale", "train.lr_scale_variant")
"""Settings whose part in task 0 the key holds in another form."""


def make_plan(configs: Iterable[RunConfig]) -> list[Job]:
    """Jobs for configurations, those first that others need; what comes out the same is run once.

    Task 0 is trained once for all runs that train it alike, which is where they agree in all but their method
    (:func:`first_task_key`). The first that trains it plainly does so; the others start from its model. Where there
    are several runs and the number of threads is open, it is one each: results depend on it, so it must not depend on
    where and beside what a run is carried out.
    """
    configs = list(configs)
    if len(configs) > 1:
        configs = [_with_threads(config) for config in configs]
    unlike = list({run_path(config): config for config in configs}.values())
    labels = _labels(unlike)
    providers: dict[str, Job] = {}
    for config, label in zip(unlike, labels, strict=True):
        if trains_plainly(config):
            providers.setdefault(first_task_key(config), Job(config, label=label))
    own = {id(job.config): job for job in providers.values()}
    jobs = [own.get(id(c)) or share_first_task(c, providers, label) for c, label in zip(unlike, labels, strict=True)]
    needed = {job.needs for job in jobs}
    return sorted(jobs, key=lambda job: job not in needed)


def share_first_task(config: RunConfig, providers: dict[str, Job], label: str = "") -> Job:
    """A job that starts from the task-0 model of the provider for its key, if it can.

    Where there is none yet and the configuration trains task 0 plainly, its job becomes the provider.
    """
    key = first_task_key(config)
    if can_share(config) and key in providers:
        return Job(config, providers[key], label)
    job = Job(config, label=label)
    if trains_plainly(config):
        providers.setdefault(key, job)
    return job


def can_share(config: RunConfig) -> bool:
    """Whether a run can start from a task-0 model that another one trained."""
    return config.train.task0 == "train" and not any(c.own_first_task for c in parse_name(config.method.name).classes)


def trains_plainly(config: RunConfig) -> bool:
    """Whether a run trains task 0 by cross-entropy alone, so that its model may serve others."""
    base, _, head = parse_name(config.method.name)
    return can_share(config) and not base.stores_data and (head.fitted or head.name == "linear")


def first_task_key(config: RunConfig) -> str:
    """The same text for all configurations that train task 0 alike when they train it plainly."""
    values = {name: value for name, value in counting(to_dict(config)).items() if not name.startswith("method.")}
    shared = {name: value for name, value in values.items() if name not in _LATER}
    shared["train.task0_epochs"] = config.train.task0_epochs or config.train.epochs
    shared["train.lr"] = task_lr(config.train, 0)
    return json.dumps(shared, sort_keys=True)


def _with_threads(config: RunConfig) -> RunConfig:
    if config.train.threads is not None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"threads": 1})})


def _labels(configs: Sequence[RunConfig]) -> list[str]:
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
