"""Learners and trained runs on the Hugging Face Hub: the files that are needed to use one, and a model card."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from infssm._modality import modality_named
from infssm.errors import CheckpointError, ConfigError
from infssm.learner.config.fields import TASK0_KINDS
from infssm.learner.config.load import load_config, to_dict, to_yaml
from infssm.learner.learner import Learner
from infssm.learner.predict import TrainedClassifier, load_classifier
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.layout import read_checked
from infssm.learner.store.versions import POINTER

try:
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
except ImportError:
    raise ConfigError("the hub needs huggingface_hub: pip install 'infssm[hf]'") from None

if TYPE_CHECKING:
    from typing_extensions import Self

_TAGS = ["continual-learning", "state-space-model", "infssm"]


class _OnHub(ModelHubMixin, library_name="infssm", tags=_TAGS):
    """Base of learners and runs on the Hub: only new folders are written, and only known files are fetched."""

    _hub_mixin_config: dict[str, Any] | None = {}  # noqa: RUF012  (the mixin's: nothing of __init__ goes to the Hub)
    _files: ClassVar[list[str]]
    """Patterns of the files that are fetched."""

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Write the files that are needed to use it into a new or empty folder; options as for the mixin."""
        folder = Path(save_directory)
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: choose a new folder")
        return super().save_pretrained(folder, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """Load a folder that :meth:`save_pretrained` wrote, or a repository of the Hub; options as for the mixin."""
        try:
            found: Self = super().from_pretrained(pretrained_model_name_or_path, **options)
        except ValueError as error:  # the mixin reads config.json itself
            raise CheckpointError(f"{pretrained_model_name_or_path}: config.json cannot be read: {error}") from None
        return found

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Self:
        asked = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        where = {name: options.pop(name) for name in asked}
        if not os.path.isdir(model_id):
            model_id = snapshot_download(model_id, allow_patterns=["config.json", "README.md", *cls._files], **where)
        return cls(model_id, **options)


class HubLearner(_OnHub):
    """A learner that can be pushed to the Hub and loaded from it, to be used or to be taught more.

    ```python
    from infssm.learner.hub import HubLearner

    HubLearner("my-learner").push_to_hub("me/photos")
    learner = HubLearner.from_pretrained("me/photos").learner
    learner.predict("cat.jpg")
    ```

    The current version is published, and none of those before it. Nothing is unpickled. A learner that was loaded is in
    memory alone: ``learner.save(folder)`` stores it, together with what it is taught from then on.

    Args:
        learner: an :class:`infssm.Learner` or its folder.
        device: where to compute, if a folder is given.
    """

    _files: ClassVar[list[str]] = [POINTER, "versions/*.json", "tensors/*.safetensors"]

    def __init__(self, learner: Learner | str | os.PathLike[str], *, device: str = "cpu") -> None:
        self.learner = learner if isinstance(learner, Learner) else Learner.load(learner, device=device)

    @classmethod
    def _from_pretrained(cls, **options: Any) -> Self:
        found = super()._from_pretrained(**options)
        found.learner.folder = None  # a folder of the download cache is not to be changed
        return found

    def predict(self, samples: Any, **options: Any) -> Any:
        """See :meth:`infssm.Learner.predict`."""
        return self.learner.predict(samples, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        self.learner.publish(save_directory, load_config(_public(to_dict(self.learner.config))))
        facts = {"model": self.learner.config.model.name, "classes": self.learner.classes}
        (save_directory / "config.json").write_text(json.dumps({"library_name": "infssm", **facts}, indent=2) + "\n")

    def generate_model_card(self, *_: Any, **__: Any) -> ModelCard:
        """The card: what it knows, what was taught when, and how right it was on samples held out."""
        learner = self.learner
        language = not learner.has_classes
        task = None if learner.modality is None else modality_named(learner.modality).hub_task
        data = ModelCardData(library_name="infssm", tags=_TAGS, pipeline_tag=task)
        word, figure = ("domains", "bits per byte") if language else ("classes", "right on samples held out")
        use = "learner.generate(prompt, 100)" if language else "learner.predict(sample)  # label, probabilities, known"
        table = [f"| lesson | time | {word} (samples) | {figure} |", "|---|---|---|---|"]
        for lesson in learner.history:
            counts = ", ".join(f"{label} ({n})" if n else label for label, n in list(lesson.samples.items())[:50])
            score = "" if lesson.score is None else f"{lesson.score:.3f}" if language else f"{100 * lesson.score:.1f} %"
            table.append(f"| {_cell(lesson.name)} | {lesson.time} | {_cell(counts)} | {score} |")
        known = ", ".join(learner.classes[:50]) + (" ..." if len(learner.classes) > 50 else "")
        text = f"""# A learner of {len(learner.classes)} {word}

A {learner.config.model.name} taught by the method `{learner.config.method.name}` of infssm, one lesson after another.
It can be taught more at any time, without the data of these lessons. It knows the {word} {_cell(known)}.

```python
from infssm.learner.hub import HubLearner

learner = HubLearner.from_pretrained("THIS REPOSITORY").learner
{use}
learner.learn("new-samples")  # one folder per class
```

## What was taught

{chr(10).join(table)}

The last column was measured right after the lesson, among all {word} known by then.
"""
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


class HubClassifier(_OnHub):
    """A run that can be pushed to the Hub and loaded from it; weights are safetensors, nothing is unpickled.

    ```python
    from infssm.learner.hub import HubClassifier

    HubClassifier("runs/digits-5/seq/vim_nano/seed0-1a2b3c4d").push_to_hub("me/digits")
    HubClassifier.from_pretrained("me/digits").predict("seven.png").label
    ```

    Args:
        run: the run directory, or a folder that :meth:`save_pretrained` wrote.
        task: the model as it was after this task; the last one by default.
        device: where to compute.

    Attributes:
        classifier: the model with its classes and its transform.
    """

    _files: ClassVar[list[str]] = [
        *(layout.MARKER, layout.CONFIG, layout.STREAM, layout.MATRIX, layout.RESULT),
        f"{layout.CHECKPOINTS}/*.safetensors",
    ]

    def __init__(self, run: str | os.PathLike[str], *, task: int | None = None, device: str = "cpu") -> None:
        self._run = RunDirectory.open(run)
        self._task = self._run.saved_task(task)
        self.classifier: TrainedClassifier = load_classifier(run, task=task, device=device)

    def predict(self, images: Any, **options: Any) -> Any:
        """Classes and probabilities of an image or a list of images: see :meth:`TrainedClassifier.predict`."""
        return self.classifier.predict(images, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        config = load_config(_public(self._run.config()))
        copy = RunDirectory.create(save_directory)
        copy.write_text(layout.CONFIG, to_yaml(config))
        copy.write_json(layout.STREAM, self._run.stream())
        for name in (layout.MATRIX, layout.RESULT):
            if (self._run.path / name).exists():
                copy.write_text(name, read_checked(self._run.path / name).decode())
        copy.write_weights(self._task, read_checked(self._run.weights_path(self._task)))
        # The mixin hands "task" back to __init__ when the folder is loaded.
        facts = {"task": self._task, "model": config.model.name, "classes": self.classifier.classes}
        (save_directory / "config.json").write_text(json.dumps({"library_name": "infssm", **facts}, indent=2) + "\n")

    def generate_model_card(self, *_: Any, **__: Any) -> ModelCard:
        """The card: what was trained, on what, how well it does on every task, and by which command."""
        modality = self.classifier.modality
        data = ModelCardData(library_name="infssm", tags=_TAGS, pipeline_tag=modality.hub_task)
        config, matrix = load_config(_public(self._run.config())), self._run.matrix()
        known = self.classifier.classes
        classes = ", ".join(known[:50]) + (" ..." if len(known) > 50 else "")
        part = "validation" if config.data.evaluate == "val" else "test"
        values = matrix.finished
        table = ["| after task | " + " | ".join(f"task {t}" for t in range(len(values))) + " |"]
        table.append("|---" * (len(values) + 1) + "|")
        for step, row in enumerate(values):
            cells = [f"{100 * value:.1f}" if value == value else "" for value in row]
            table.append(f"| {step} | " + " | ".join(cells) + " |")
        text = f"""# {config.method.name} on {config.data.name}, {config.model.name}

A classifier that learned its classes in {config.data.num_tasks} tasks, one after the other, by the method
`{config.method.name}` of infssm; this is the model after task {self._task}.
It knows {len(known)} classes: {classes}.

```python
from infssm.learner.hub import HubClassifier

HubClassifier.from_pretrained("THIS REPOSITORY").predict("image.png").label
```

## Accuracy

Accuracy in percent on the {part} {modality.word} of every task (columns) after every task (rows), predicted
among all classes seen so far. Average accuracy (AA) {100 * matrix.aa:.2f}, average incremental accuracy
{100 * matrix.aia:.2f}, forgetting (FM) {100 * matrix.fm():.2f} points.

{chr(10).join(table)}

## Training

`config.yaml` holds every setting, so `infssm run -c config.yaml` with the data trains it again (seed {config.seed}).
"""
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without paths of the machine it was trained on."""
    data, model, train = ({**values[section]} for section in ("data", "model", "train"))
    data |= {"root": None, "name": _last(data["name"])}
    model["weights"] = None if model.get("weights") is None else _last(model["weights"])
    if train.get("task0", "train") not in TASK0_KINDS:
        train["task0"] = _last(train["task0"])
    return {**values, "data": data, "model": model, "train": train, "out": "runs"}


def _cell(text: str) -> str:
    """Text of a user in a table of Markdown."""
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", " ")


def _last(path: str) -> str:
    return path.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
