"""`RunConfig`: everything that decides what a run computes, each field with its unit, meaning and source.

"Table 12" and the like are tables of the Inf-SSM paper; "release" is the authors' published code.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from infssm.errors import ConfigError
from infssm.methods import canonical_name


def _path(text: str) -> str:
    """Refuse paths that no file system accepts: names may have 255 bytes (Linux, macOS, Windows), paths 4,096."""
    if not text.strip():
        raise ValueError("is empty")
    if len(os.fsencode(text)) > 4000 or any(len(os.fsencode(part)) > 255 for part in text.split("/")):
        raise ValueError("is longer than any path can be")
    if os.path.expanduser(text).startswith("~"):
        raise ValueError("starts with ~name, but there is no such user")
    return text


def _name_of_folder(text: str) -> str:
    """Refuse a folder name that points outside its parent."""
    if text.startswith(("/", "~")) or ".." in text.split("/"):
        raise ValueError("leads out of the folder `out`")
    return text


_FREE: dict[str, JsonValue] = {"counts": False}
"""Marks settings that say where a run reads and writes, and how fast: its results, and so its hash, do not depend on
them."""
PathText = Annotated[str, AfterValidator(_path)]
TASK0_KINDS = ("train", "plain", "own")
"""Values of ``train.task0`` that are not weights."""
Size = Annotated[int, Field(ge=1, le=10**9)]


class Section(BaseModel):
    """Base of all sections. Frozen; unknown fields, infinities, and booleans in place of numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation is not bool:
            raise ValueError("must not be true or false")
        return value


class _Named(Section):
    """A section that may be written as its name alone: ``model: vim_nano``."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class DataConfig(_Named):
    """The stream of tasks."""

    name: PathText = Field(
        default="digits", description="data set: see `infssm list datasets`, or a path to a folder or .npz"
    )
    root: PathText | None = Field(
        default=None,
        json_schema_extra=_FREE,
        description="folder that holds the data; null: $INFSSM_DATA, else ~/.cache/infssm/data (not part of the hash)",
    )
    num_tasks: Size = Field(
        default=5, description="tasks, which share the classes as equally as can be (paper: 5 and 10)"
    )
    base_classes: Size | None = Field(
        default=None, description="classes of task 0, the other num_tasks - 1 tasks share the rest; null: a share"
    )
    tasks: list[list[int | str]] | None = Field(
        default=None,
        description="labels or names of each task's classes, such as [[0, 1], [2]]; classes not named are left out; "
        "null: by number",
    )
    by: str | None = Field(
        default=None,
        description="what makes tasks: 'class'; or 'domain' (or the data's own word, such as 'speaker'; of hf: data "
        "any column): the same classes or language, in a new domain each time; the settings above then count domains "
        "instead of classes; null: 'class', for text 'domain'",
    )
    class_order_seed: int | Literal["run"] | None = Field(
        default=None,
        description="null: natural class order, as the release; else the seed of a permutation of the classes; 'run': "
        "the run's own seed, so that seeds repeat the stream in other orders",
    )
    split_seed: int = Field(
        default=0, description="seed of the train/val/test split; the release uses 0 for every run seed"
    )
    train_per_class: Size | None = Field(
        default=None,
        description="samples per class (and domain) kept for training, and a ninth as many for validation unless "
        "test_per_class is given; null: all",
    )
    test_per_class: Size | None = Field(
        default=None, description="samples per class (and domain) kept for testing and for validation; null: all"
    )
    bands: Size | None = Field(
        default=None,
        description="audio: log energies in so many frequency bands every 10 ms take the place of the waveform; null: "
        "they do not",
    )
    recipe: str = Field(
        default="light", description="training augmentation: 'light' for small images, 'deit' as the release, 'none'"
    )
    image_size: int | None = Field(
        default=None,
        ge=1,
        le=8192,
        description="pixels; null: the data set's own size, with 'deit' the model's (release: 224)",
    )
    eval_normalization: Literal["same", "authors"] = Field(
        default="same",
        description="'authors': evaluate CIFAR-100 with CIFAR statistics though trained with ImageNet's (release)",
    )
    val_transform: Literal["eval", "train"] = Field(
        default="eval", description="transform of validation images; the release uses 'train' for CIFAR-100 and CUB"
    )
    evaluate: Literal["test", "val"] = Field(
        default="test",
        description="images that accuracies are measured on after each task; 'val': validation images, and no test "
        "image is looked at (what `infssm sweep` does)",
    )
    skip_unreadable: bool = Field(
        default=False, description="go on without image files that cannot be read; false: list them and stop"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="further options of the data set")

    @model_validator(mode="before")
    @classmethod
    def _count_tasks(cls, value: Any) -> Any:
        """Tasks given by their classes are as many as there are."""
        if isinstance(value, dict) and isinstance(value.get("tasks"), list):
            return {**value, "num_tasks": len(value["tasks"])}
        return value


class ModelConfig(_Named):
    """The backbone."""

    name: str = Field(
        default="vim_nano",
        description="model: see `infssm list models`; or hf: and a folder or name of a language model of transformers",
    )
    weights: PathText | None = Field(
        default=None, description="file or name of pre-trained weights (release: public ImageNet-1k Vim)"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="constructor options of the model, such as depth")


def one_spelling(method: str) -> str:
    """A method's name as it is always written, so that its runs share a directory; unknown names stay as they are."""
    try:
        return canonical_name(method)
    except ConfigError:  # check_config says what is wrong with it
        return method


class MethodConfig(_Named):
    """The continual-learning method: its name, and its components' options flat or by component."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    name: str = Field(
        default="inf-ssm-exact", description="method, or base and regularizers joined by '+': see `infssm list methods`"
    )

    @field_validator("name")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return one_spelling(value)

    @property
    def options(self) -> dict[str, Any]:
        """All options but the name."""
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """Optimizer, schedule, start, devices."""

    epochs: Size = Field(default=4, description="epochs per task (Tables 12-19: 20 or 40)")
    batch_size: Size = Field(default=32, description="images per step over all processes (Tables 12-19: 32, 64 or 128)")
    eval_batch_size: Size | None = Field(
        default=None, description="images per evaluation batch; null: twice batch_size (release)"
    )
    lr: float = Field(default=1e-3, gt=0, description="base learning rate of AdamW (Tables 12-19)")
    warmup_lr: float = Field(default=1e-5, ge=0, description="learning rate at which warm-up starts (Tables 12-19)")
    min_lr: float = Field(default=1e-5, ge=0, description="learning rate at which the cosine ends (Tables 12-19)")
    warmup_epochs: float = Field(
        default=0.5, ge=0, description="epochs of linear warm-up (release: 5); whole epochs with 'authors'"
    )
    schedule: Literal["authors", "plain"] = Field(
        default="plain",
        description="'authors': epoch-wise, one epoch behind, cosine that counts the warm-up in (release); "
        "'plain': step-wise warm-up, then cosine over the rest",
    )
    lr_scale: float = Field(
        default=1.0, gt=0, le=1, description="factor on the base learning rate per task (Tables 12-19: 0.25, 0.5)"
    )
    lr_scale_variant: Literal["authors", "plain", "once"] = Field(
        default="plain",
        description="base of task t: 'authors' lr*s^(t+1) (release), 'plain' lr*s^t, 'once' lr then lr*s",
    )
    weight_decay: float = Field(
        default=0.05, ge=0, description="AdamW weight decay; none on 1-D parameters and biases (Tables: 0.1)"
    )
    mixing: Literal["none", "deit"] = Field(
        default="none", description="'deit': Mixup 0.8 / CutMix 1.0, every batch (release)"
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="mass spread over all classes (release: 0.1)")
    select_best: bool = Field(
        default=False,
        description="end each task with the epoch of best validation accuracy on that task (release), which favours "
        "the new task over the old ones; false: with the last, which alone is validated",
    )
    task0: PathText = Field(
        default="train",
        description="model after task 0. 'plain': trained by cross-entropy alone, once for all runs that agree in what "
        "acts on task 0; 'own': trained by the method itself; 'train': 'plain', or 'own' for methods that need it; "
        "else file or name of weights (release)",
    )
    task0_epochs: Size | None = Field(default=None, description="epochs of task 0 where trained; null: epochs")
    limit_batches: Size | None = Field(
        default=None, description="steps per epoch and evaluation batches at most; null: all"
    )
    precision: Literal["32-true", "bf16-mixed"] = Field(
        default="32-true",
        description="arithmetic; states and distances stay in float32 (release: 32), and all does on a CPU without "
        "instructions for bfloat16",
    )
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="device kind")
    devices: int = Field(
        default=1, ge=1, le=4096, description="processes, one device each; under torchrun its world size decides"
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="CPU threads per process; null: 1 for models called ..._nano, else torch's choice. Decided before "
        "the run is hashed, and stored",
    )
    num_workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        json_schema_extra=_FREE,
        description="loader processes; null: one per core where images are read or transformed one by one; results do "
        "not depend on it (not part of the hash)",
    )
    log_every: Size = Field(
        default=10,
        json_schema_extra=_FREE,
        description="steps between two step lines of metrics.jsonl (not part of the hash)",
    )


class LogConfig(Section):
    """Optional loggers beside metrics.jsonl, which is always written. Not part of the hash."""

    tensorboard: bool = Field(default=False, description="write TensorBoard events into the run directory")
    wandb: bool = Field(default=False, description="log to Weights & Biases; key from the environment; extra 'wandb'")
    mlflow: bool = Field(default=False, description="log to MLflow; address from the environment; extra 'mlflow'")


class RunConfig(Section):
    """One run: one stream, one model, one method, one seed."""

    benchmark: Annotated[PathText, AfterValidator(_name_of_folder)] | None = Field(
        default=None, description="name of the run directory's first level; null: <data>-<tasks>"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = Field(default=LogConfig(), json_schema_extra=_FREE)
    seed: int = Field(default=0, ge=0, description="seeds initialisation, order and augmentation (paper: 0, 10, 100)")
    out: PathText = Field(
        default="runs",
        json_schema_extra=_FREE,
        description="folder under which run directories are made (not part of the hash)",
    )

    @property
    def benchmark_name(self) -> str:
        """``benchmark``, or the data set and the number of tasks."""
        return self.benchmark or f"{self.data.name.strip('/').split('/')[-1][:60]}-{self.data.num_tasks}"


def free_settings(section: type[BaseModel] = RunConfig, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of the settings and sections that results do not depend on."""
    found: list[str] = []
    for name, field in section.model_fields.items():
        if field.json_schema_extra == _FREE:
            found.append(prefix + name)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += free_settings(field.annotation, f"{prefix}{name}.")
    return tuple(found)
