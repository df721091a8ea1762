"""Trained runs on the Hugging Face Hub: the files that are needed to use one, and a model card."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infssm.errors import CheckpointError, ConfigError
from infssm.learner.config.fields import TASK0_KINDS
from infssm.learner.config.load import load_config, to_yaml
from infssm.learner.predict import TrainedClassifier, load_classifier
from infssm.learner.store import names
from infssm.learner.store.directory import RunDirectory
from infssm.learner.store.manifest import read_checked

try:
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
except ImportError:
    raise ConfigError("the hub needs huggingface_hub: pip install 'infssm[hf]'") from None

_TAGS = ["continual-learning", "state-space-model", "infssm"]
_FILES = [names.MARKER, names.CONFIG, names.STREAM, names.MATRIX, names.RESULT, "config.json", "README.md"]


class HubClassifier(ModelHubMixin, library_name="infssm", tags=_TAGS):
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

    _hub_mixin_config: dict[str, Any] | None = {}  # noqa: RUF012  (the mixin's: nothing of __init__ goes to the Hub)

    def __init__(self, run: str | os.PathLike[str], *, task: int | None = None, device: str = "cpu") -> None:
        self._run = RunDirectory.open(run)
        self._task = self._run.saved_task(task)
        self.classifier: TrainedClassifier = load_classifier(run, task=task, device=device)

    def predict(self, images: Any, **options: Any) -> Any:
        """Classes and probabilities of an image or a list of images: see :meth:`TrainedClassifier.predict`."""
        return self.classifier.predict(images, **options)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Write the files that are needed to use the run into a new or empty folder; options as for the mixin."""
        folder = Path(save_directory)
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: choose a new folder")
        return super().save_pretrained(folder, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        config = load_config(_public(self._run.config()))
        copy = RunDirectory.create(save_directory)
        copy.write_text(names.CONFIG, to_yaml(config))
        copy.write_json(names.STREAM, self._run.stream())
        for name in (names.MATRIX, names.RESULT):
            if (self._run.path / name).exists():
                copy.write_text(name, read_checked(self._run.path / name).decode())
        copy.write_weights(self._task, read_checked(self._run.weights_path(self._task)))
        # The mixin hands "task" back to __init__ when the folder is loaded.
        facts = {"task": self._task, "model": config.model.name, "classes": self.classifier.classes}
        (save_directory / "config.json").write_text(json.dumps({"library_name": "infssm", **facts}, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> HubClassifier:
        """Load a folder that :meth:`save_pretrained` wrote, or a repository of the Hub; options as for the mixin."""
        try:
            found: HubClassifier = super().from_pretrained(pretrained_model_name_or_path, **options)
        except ValueError as error:  # the mixin reads config.json itself
            raise CheckpointError(f"{pretrained_model_name_or_path}: config.json cannot be read: {error}") from None
        return found

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **options: Any,
    ) -> HubClassifier:
        if not os.path.isdir(model_id):
            model_id = snapshot_download(
                model_id,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
                allow_patterns=[*_FILES, f"{names.CHECKPOINTS}/*.safetensors"],
            )
        return cls(model_id, **options)

    def generate_model_card(self, *_: Any, **__: Any) -> ModelCard:
        """The card: what was trained, on what, how well it does on every task, and by which command."""
        data = ModelCardData(
            library_name="infssm", tags=_TAGS, pipeline_tag="image-classification", datasets=None, license=None
        )
        config, matrix = load_config(_public(self._run.config())), self._run.matrix()
        known = self.classifier.classes
        classes = ", ".join(known[:50]) + (" ..." if len(known) > 50 else "")
        part = "validation" if config.data.evaluate == "val" else "test"
        values = matrix.class_incremental.values
        table = ["| after task | " + " | ".join(f"task {t}" for t in range(len(values))) + " |"]
        table.append("|---" * (len(values) + 1) + "|")
        for step, row in enumerate(values):
            cells = [f"{100 * value:.1f}" if value == value else "" for value in row]
            table.append(f"| {step} | " + " | ".join(cells) + " |")
        text = f"""# {config.method.name} on {config.data.name}, {config.model.name}

An image classifier that learned its classes in {config.data.num_tasks} tasks, one after the other, by the method
`{config.method.name}` of infssm; this is the model after task {self._task}.
It knows {len(known)} classes: {classes}.

```python
from infssm.learner.hub import HubClassifier

HubClassifier.from_pretrained("THIS REPOSITORY").predict("image.png").label
```

## Accuracy

Accuracy in percent on the {part} images of every task (columns) after every task (rows), predicted among all
classes seen so far. Average accuracy (AA) {100 * matrix.aa:.2f}, average incremental accuracy
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


def _last(path: str) -> str:
    return path.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
