"""`RunConfig`: everything that decides what a run computes, each field with its unit, meaning and source.

"Table 12" and the like are tables of the Inf-SSM paper; "release" is the authors' published code.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from infssm.errors import ConfigError
from infssm.methods import canonical_name


def _path(text: str) -> str:
    """Refuse paths that no file system accepts: names may have 255 bytes (Linux, macOS, Windows), paths 4,096."""
    if not text.strip():
        raise ValueError("is empty")
    if len(os.fsencode(text)) > 4000 or max(map(len, os.fsencode(text).split(b"/"))) > 255:
        raise ValueError("is longer than any path can be")
    if os.path.expanduser(text).startswith("~"):
        raise ValueError("starts with ~name, but there is no such user")
    return text


_FREE: dict[str, JsonValue] = {"counts": False}
"""Marks settings that say where a run reads and writes, and how fast: its results, and so its hash, do not depend on
them."""
PathText = Annotated[str, AfterValidator(_path)]
TASK0_KINDS = ("train", "plain", "own", "skip")
"""Values of ``train.task0`` that are not weights."""
Size = Annotated[int, Field(ge=1, le=10**9)]


class Section(BaseModel):
    """Base of all sections. Frozen; unknown fields and infinities are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, values: Any) -> Any:
        """Read a section that is given only by its name: ``model: vim_nano``."""
        return {"name": values} if isinstance(values, str) and "name" in cls.model_fields else values


class DataConfig(Section):
    """The stream of tasks."""

    name: PathText = "digits"
    """data set: see `infssm list datasets`, or a path to a folder or .npz"""
    root: PathText | None = Field(default=None, json_schema_extra=_FREE)
    """folder that holds the data; null: $INFSSM_DATA, else ~/.cache/infssm/data (not part of the hash)"""
    num_tasks: Size = 5
    """number of tasks; the classes are divided among them as equally as possible (paper: 5 and 10)"""
    base_classes: Size | None = None
    """classes of task 0; the other num_tasks - 1 tasks share the rest; null: as many as the other tasks"""
    tasks: list[list[int | str]] | None = None
    """labels or names of each task's classes, such as [[0, 1], [2]]; classes not named are left out; null: by number"""
    by: str | None = None
    """what makes tasks: 'class'; or 'domain' (or the data's own word, such as 'speaker'; of hf: data any column): the
    same classes or language, in a new domain each time; the settings above then count domains instead of classes;
    null: 'class', for text 'domain'"""
    class_order_seed: int | Literal["run"] | None = None
    """null: natural class order, as the release; else the seed of a permutation of the classes; 'run': the run's own
    seed, so that seeds repeat the stream in other orders"""
    split_seed: int = 0
    """seed of the train/val/test split; the release uses 0 for every run seed"""
    train_per_class: Size | None = None
    """samples per class (and domain) kept for training, and a ninth as many for validation unless test_per_class is
    given; null: all"""
    shots: Size | list[int] | None = None
    """few-shot streams: training samples per class of the tasks after the first, or the data set indices of all of them
    (a benchmark's published list); null: as many as there are"""
    online: bool = False
    """one pass over all tasks' samples in stream order, and the method is told of no boundary between tasks: each batch
    is classified before it is trained on (test-then-train), and the model is tested on all classes at the end"""
    blur: float = Field(default=0.0, ge=0, le=1)
    """with online: share of samples that come at a random place of the stream instead of with their task"""
    test_per_class: Size | None = None
    """samples per class (and domain) kept for testing and for validation; null: all"""
    bands: Size | None = None
    """audio: replace the waveform by log energies in this many frequency bands, one step every 10 ms; null: keep the
    waveform"""
    recipe: str = "light"
    """training augmentation: 'light' for small images, 'deit' as the release, 'none'"""
    image_size: int | None = Field(default=None, ge=1, le=8192)
    """pixels; null: the data set's own size, with 'deit' the model's (release: 224)"""
    eval_normalization: Literal["same", "authors"] = "same"
    """'authors': evaluate CIFAR-100 with CIFAR statistics though trained with ImageNet's (release)"""
    val_transform: Literal["eval", "train"] = "eval"
    """transform of validation images; the release uses 'train' for CIFAR-100 and CUB"""
    evaluate: Literal["test", "val"] = "test"
    """images on which accuracy is measured after each task; 'val': validation images, so that no test image is used
    (what `infssm sweep` does)"""
    skip_unreadable: bool = False
    """leave out image files that cannot be read; false: list them and stop"""
    options: dict[str, Any] = {}
    """further options of the data set"""

    @model_validator(mode="after")
    def _fits_online(self) -> DataConfig:
        if self.blur and not self.online:
            raise ValueError("blur needs a stream without task boundaries: also set online=true")
        if self.online and self.shots is not None:
            raise ValueError("shots counts samples per task after the first, but an online stream has no tasks")
        return self

    @model_validator(mode="before")
    @classmethod
    def _count_tasks(cls, value: Any) -> Any:
        """Set ``num_tasks`` to the number of tasks that are listed."""
        if isinstance(value, dict) and isinstance(value.get("tasks"), list):
            return {**value, "num_tasks": len(value["tasks"])}
        return value


class ModelConfig(Section):
    """The backbone."""

    name: str = "vim_nano"
    """model: see `infssm list models`; or hf: and a folder or name of a language model of transformers"""
    weights: PathText | None = None
    """file or name of pre-trained weights (release: public ImageNet-1k Vim)"""
    classes: Literal["all", "grow"] = "all"
    """outputs of the classifier. 'all': of every class of the stream from the start (release, Mammoth); 'grow': of the
    classes met so far, more with every task, without knowledge of what will come, as a Learner has them"""
    options: dict[str, Any] = {}
    """constructor options of the model, such as depth"""


def one_spelling(method: str) -> str:
    """The canonical name of a method, so that its runs share a directory; unknown names are returned unchanged."""
    try:
        return canonical_name(method)
    except ConfigError:  # check_config reports what is wrong with it
        return method


class MethodConfig(Section):
    """The continual-learning method: its name, and its components' options flat or by component."""

    model_config = ConfigDict(extra="allow")
    name: str = "inf-ssm-exact"
    """method, or base and regularizers joined by '+': see `infssm list methods`"""

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

    epochs: Size = 4
    """epochs per task (Tables 12-19: 20 or 40)"""
    batch_size: Size = 32
    """images per step over all processes (Tables 12-19: 32, 64 or 128)"""
    eval_batch_size: Size | None = None
    """images per evaluation batch; null: twice batch_size (release)"""
    lr: float = Field(default=1e-3, gt=0)
    """base learning rate of AdamW (Tables 12-19)"""
    warmup_lr: float = Field(default=1e-5, ge=0)
    """learning rate at which warm-up starts (Tables 12-19)"""
    min_lr: float = Field(default=1e-5, ge=0)
    """learning rate at which the cosine ends (Tables 12-19)"""
    warmup_epochs: float = Field(default=0.5, ge=0)
    """epochs of linear warm-up (release: 5); whole epochs with 'authors'"""
    schedule: Literal["authors", "plain"] = "plain"
    """'authors': epoch-wise, one epoch behind, cosine that includes the warm-up (release); 'plain': step-wise warm-up,
    then cosine over the rest"""
    lr_scale: float | None = Field(default=None, gt=0)
    """factor on the base learning rate per task (Tables 12-19: 0.25, 0.5); above 1 for self-replay, with 'once'; null:
    0.03 with 'once' where a fitted head (lda, gda, ...) follows features that move, else 1"""
    lr_scale_variant: Literal["authors", "plain", "once"] = "plain"
    """base of task t: 'authors' lr*s^(t+1) (release), 'plain' lr*s^t, 'once' lr then lr*s"""
    weight_decay: float = Field(default=0.05, ge=0)
    """AdamW weight decay; none on 1-D parameters and biases (Tables: 0.1)"""
    mixing: Literal["none", "deit"] = "none"
    """'deit': Mixup 0.8 / CutMix 1.0, every batch (release)"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """mass spread over all classes (release: 0.1)"""
    select_best: bool = False
    """end each task with the epoch of best validation accuracy on that task (release), which favours the new task over
    the old ones; false: with the last, the only one that is validated"""
    task0: PathText = "train"
    """model after task 0. 'plain': trained by cross-entropy alone, once for all runs that agree in what acts on task 0;
    'own': trained by the method itself; 'train': 'plain', or 'own' for methods that need it; 'skip': not trained, the
    model as `model.weights` has it; else file or name of weights (release)"""
    task0_epochs: Size | None = None
    """epochs of task 0 where trained; null: epochs"""
    limit_batches: Size | None = None
    """steps per epoch and evaluation batches at most; null: all"""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """arithmetic; states and distances stay in float32 (release: 32), and everything does on a CPU without bfloat16
    instructions"""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """device kind"""
    devices: int = Field(default=1, ge=1, le=4096)
    """processes, one device each; under torchrun its world size decides"""
    threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads per process; null: 1 for models named ..._nano, else torch's choice. Decided before the run is
    hashed, and stored"""
    num_workers: int | None = Field(default=None, ge=0, le=1024, json_schema_extra=_FREE)
    """loader processes; null: one per core where images are read or transformed one by one; results do not depend on it
    (not part of the hash)"""
    log_every: Size = Field(default=10, json_schema_extra=_FREE)
    """steps between two step lines of metrics.jsonl (not part of the hash)"""


class LogConfig(Section):
    """Optional loggers beside metrics.jsonl, which is always written. Not part of the hash."""

    tensorboard: bool = False
    """write TensorBoard events into the run directory"""
    wandb: bool = False
    """log to Weights & Biases; key from the environment; extra 'wandb'"""
    mlflow: bool = False
    """log to MLflow; address from the environment; extra 'mlflow'"""


class RunConfig(Section):
    """One run: one stream, one model, one method, one seed."""

    benchmark: PathText | None = None
    """name of the run directory's first level; null: <data>-<tasks>"""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = Field(default=LogConfig(), json_schema_extra=_FREE)
    seed: int = Field(default=0, ge=0)
    """seeds initialisation, order and augmentation (paper: 0, 10, 100)"""
    out: PathText = Field(default="runs", json_schema_extra=_FREE)
    """folder under which run directories are made (not part of the hash)"""

    @field_validator("benchmark")
    @classmethod
    def _stays_below_out(cls, text: str | None) -> str | None:
        if text is not None and (text.startswith(("/", "~")) or ".." in text.split("/")):
            raise ValueError("leads out of the folder `out`")
        return text

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
