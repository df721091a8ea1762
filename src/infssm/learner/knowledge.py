"""The knowledge of a learner at one version, its storage, and predictions from features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infssm._batch import moved_to
from infssm.data import Recipe, StreamFacts
from infssm.errors import ConfigError
from infssm.learner.calibration import Calibration, HeldOut, calibrate, logits_by
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config, to_dict
from infssm.learner.predict import Prediction, predictions
from infssm.learner.saving import Position, load_newest
from infssm.learner.scoring import SCORES
from infssm.learner.setup import OWN, OwnModel, build_method_and_recipe, known_facts
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.versions import Versions
from infssm.methods import Method
from infssm.methods.core.head import Features, FittedHead
from infssm.methods.core.passes import evaluating
from infssm.methods.core.tasks import BatchLike
from infssm.models.features import classifier_prefix, features, find_classifier
from infssm.ssm import unwrap


@dataclass(frozen=True)
class Lesson:
    """One call of :meth:`infssm.Learner.learn`.

    Attributes:
        name: given by the user, or made from the data.
        time: when it was over, UTC, ISO 8601; empty for a task of ``infssm run``.
        samples: number of samples of each class; of language, of the domain.
        score: accuracy on held-out samples of this lesson right after it, among all classes known; of language bits per
            byte (or token) of its held-out text. None if nothing was held out.
        seconds: how long it took.
    """

    name: str
    time: str
    samples: dict[str, int]
    score: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Knowledge:
    """A learner at one version. It is replaced as a whole, so a reader never sees half of a change.

    Attributes:
        config: all settings.
        facts: classes, tasks and kind of samples; None before the first lesson, as the next two.
        method: model, head and everything else that was learnt.
        recipe: how images become model input; None for sequences.
        history: the lessons, oldest first.
        held_out: features of samples that calibrate it; None for language.
        calibration: how sure it may be.
        trained: whether weights were trained on something that was taught.
        version: 0 before the first.
        parent: the version before, 0 for none.
        own: the user's own module, if the model is one.
    """

    config: RunConfig
    facts: StreamFacts | None = None
    method: Method | None = None
    recipe: Recipe | None = None
    history: tuple[Lesson, ...] = ()
    held_out: HeldOut | None = None
    calibration: Calibration | None = None
    trained: bool = False
    version: int = 0
    parent: int = 0
    own: OwnModel | None = None

    @property
    def has_classes(self) -> bool:
        """Whether it knows classes; a language model knows domains."""
        return self.facts is None or SCORES[self.facts.modality.scoring].has_classes

    def taught(self) -> tuple[Method, StreamFacts]:
        """Method and facts, once something was taught."""
        if self.method is None or self.facts is None:
            raise ConfigError("the learner knows nothing yet: call learn(...) first")
        return self.method, self.facts

    def write(self, versions: Versions, *, unknown: float, parent: int) -> int:
        """Store it as a new version; return its number."""
        method, facts = self.taught()
        content = {
            "unknown": unknown,
            "config": to_dict(self.config),
            "facts": facts.to_json(),
            "history": [asdict(lesson) for lesson in self.history],
            "trained": self.trained,
        }
        state = {
            "module": resting_weights(method, with_classifier=self.trained),
            "method": {**method.state_dict(), "head": None},  # a fitted head follows from its statistics
            "held_out": self.held_out.state_dict() if self.held_out is not None and len(self.held_out.labels) else None,
            "calibration": None if self.calibration is None else self.calibration.state_dict(),
        }
        return versions.write(content, state, parent=parent)

    @classmethod
    def read(cls, versions: Versions, number: int, device: str, own: OwnModel | None = None) -> tuple[Knowledge, float]:
        """A stored version, and the share of samples that may be called unknown."""
        content = versions.content(number)
        config, facts = load_config(content["config"]), StreamFacts.from_json(content["facts"])
        name = config.model.name
        if name.startswith(OWN) and (own is None or type(own.module).__name__ != name.removeprefix(OWN)):
            raise ConfigError(
                f"the model of {versions.folder} is a module of its user, of class {name.removeprefix(OWN)}: give one "
                "as infssm.Learner.load(folder, model=..., transform=...); its weights are in the folder"
            )
        own = own if name.startswith(OWN) else None
        state = versions.state(content)
        method, recipe = _opened(config, facts, device, state["module"], state["method"], own)
        held_out, calibration = state["held_out"], state["calibration"]
        knowledge = cls(
            config,
            facts,
            method,
            recipe,
            tuple(Lesson(**lesson) for lesson in content["history"]),
            None if held_out is None else HeldOut.of(held_out),
            None if calibration is None else Calibration(**calibration),
            bool(content["trained"]),
            number,
            int(content["parent"]),
            own,
        )
        return knowledge, float(content["unknown"])

    @classmethod
    def of_run(cls, run: RunDirectory, device: str) -> Knowledge:
        """The knowledge of a run after the tasks that it finished."""
        config, facts = load_config(run.config()), StreamFacts.from_json(run.stream())
        # Lessons have boundaries, whatever the stream of the run was like.
        config = config.model_copy(update={"data": config.data.model_copy(update={"online": False, "blur": 0.0})})
        if facts.modality.scoring == "numbers":
            raise ConfigError(f"{run.path} predicts numbers, and a learner knows classes or text: use `infssm eval`")
        saved, _ = load_newest(run.last_checkpoint)
        position = Position(**saved["position"])
        if position.begun or not position.task:
            raise ConfigError(f"{run.path} stopped inside a task: finish it with `infssm resume {run.path}`")
        facts = known_facts(config, facts, position.known_task).up_to(position.known_task)
        method, recipe = _opened(config, facts, device, saved["module"], saved["method"])
        groups = [facts.classes[sum(facts.task_sizes[:t]) :][:size] for t, size in enumerate(facts.task_sizes)]
        if facts.domains:
            groups = [(domain,) for domain in facts.domains]
        history = tuple(Lesson(f"task {t + 1}", "", dict.fromkeys(group, 0)) for t, group in enumerate(groups))
        return cls(config, facts, method, recipe, history, trained=True)

    def without(self, name: str, *, unknown: float) -> Knowledge:
        """The knowledge without a class, as if never seen, except for trained weights."""
        known, facts = self.taught()
        label, fewer = facts.classes.index(name), facts.without(facts.classes.index(name))
        device, weights = str(known.context.device), resting_weights(known, with_classifier=self.trained)
        # A copy forgets: this one still serves predictions, and remains if nothing can be written.
        method, _ = _opened(self.config, facts, device, weights, {**known.state_dict(), "head": None}, self.own)
        for component in method.components:
            component.forget(label)
        state = method.state_dict()
        place = f".{find_classifier(unwrap(method.module)).name}."
        for tensors in filter(None, (weights, state["old"])):
            for key, value in tensors.items():
                if place in f".{key}" and value.ndim and len(value) == len(facts.classes):
                    tensors[key] = torch.cat([value[:label], value[label + 1 :]])
        past = sum(fewer.task_sizes[:-1])
        block = [past if fewer.task_sizes[-1] else 0, len(fewer.classes)]
        state["task"] = {"index": len(fewer.task_sizes) - 1, "classes": block, "past": past}
        grown, recipe = _opened(self.config, fewer, device, weights, {**state, "head": None}, self.own)
        lessons, before = [], True
        for one in self.history:
            before = before and name not in one.samples
            others = {k: n for k, n in one.samples.items() if k != name}
            # From the lesson that taught the class on, accuracies depend on it.
            lessons.append(replace(one, samples=others, score=one.score if before else None))
        held_out = None if self.held_out is None else self.held_out.without(label)
        rest = replace(
            self, facts=fewer, method=grown, recipe=recipe, history=tuple(one for one in lessons if one.samples)
        )
        return rest.calibrated(held_out, unknown=unknown)

    # Predictions from features.

    def calibrated(self, held_out: HeldOut | None, *, unknown: float) -> Knowledge:
        """Calibrated on held-out features."""
        calibration = None if held_out is None else calibrate(self.taught()[0].head, held_out, unknown)
        return replace(self, held_out=held_out, calibration=calibration)

    @torch.no_grad()
    def scores(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits and squared distances to the classes, ``[b, K]`` each, of features ``[b, d]``.

        There are no distances without a fitted head.
        """
        method, facts = self.taught()
        logits = logits_by(method.head, rows)[:, : len(facts.classes)]
        return logits.cpu(), method.head.distances(rows.to(method.context.device))

    def judge(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and probabilities ``[b, K]`` of features ``[b, d]``, and which of them are like some class ``[b]``."""
        logits, distances = self.scores(rows)
        if self.calibration is None:
            return logits, logits.softmax(1), torch.ones_like(logits[:, 0], dtype=torch.bool)
        return logits, self.calibration.probabilities(logits), self.calibration.known(logits, distances)

    @torch.no_grad()
    def predictions(self, rows: Tensor) -> list[Prediction]:
        """Predictions from features ``[b, d]``."""
        return predictions(self.taught()[1].classes, *self.judge(rows))

    @torch.no_grad()
    def features(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Features ``[b, d]`` of model input ``[b, ...]``, on the CPU."""
        method, _ = self.taught()
        views = method.head.views if isinstance(method.head, FittedHead) else None
        return (views or features)(unwrap(method.module), moved_to(method.module, x)).float().cpu()

    @torch.no_grad()
    def features_of(self, loader: Iterable[BatchLike]) -> tuple[Tensor, Tensor]:
        """Features ``[n, d]`` and labels ``[n]`` of the samples of a loader, on the CPU."""
        method, _ = self.taught()
        views = method.head.views if isinstance(method.head, FittedHead) else None
        with evaluating(method.module):
            rows = [
                (row.new.float().cpu(), row.y.cpu()) for row in Features(method.context, loader, old=False, views=views)
            ]
        return torch.cat([row for row, _ in rows]), torch.cat([y for _, y in rows])


def resting_weights(method: Method, *, with_classifier: bool) -> dict[str, Tensor]:
    """The module's tensors, with the trained classifier instead of a fitted head.

    A classifier that was never trained is left out: it is as the seed initializes it.
    """
    prefix = (
        "" if method.context.modality.scoring == "tokens" else classifier_prefix(method.module, unwrap(method.module))
    )
    weights: dict[str, Tensor] = dict(method.module.state_dict())
    if not prefix:
        return weights
    installed = method.head.installed_state()
    if installed is not None or not with_classifier:
        weights = {key: value for key, value in weights.items() if not key.startswith(prefix)}
    if installed is not None and with_classifier:
        weights |= {prefix + key: value for key, value in installed["trained"].items()}
    return weights


def _opened(
    config: RunConfig,
    facts: StreamFacts,
    device: str,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
    own: OwnModel | None = None,
) -> tuple[Method, Recipe | None]:
    """Method and recipe with a stored state, ready to predict."""
    method, recipe = build_method_and_recipe(config, facts, torch.device(device), weights=False, own=own)
    method.grow_from(state, {**method.module.state_dict(), **weights})
    if isinstance(method.head, FittedHead):
        method.head.refit()
    method.module.eval()
    return method, recipe
