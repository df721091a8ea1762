"""The names of a run's files. Other files in a run directory are never touched."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

MARKER = "run.json"
LOCK = "lock"
CONFIG = "config.yaml"
ENV = "env.json"
SPLIT = "split.json"
STREAM = "stream.json"
METRICS = "metrics.jsonl"
MATRIX = "accuracy_matrix.csv"
CONFUSION = "confusion.json"
RESULT = "result.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
TASK0 = "task0"
"""Folder of a benchmark in which the models after task 0 are that its runs share."""
LAST = f"{CHECKPOINTS}/last.ckpt"

REMEDY = "restore it, or delete it if you can do without"
"""The way out where one of a run's files is damaged."""

_FILES = (MARKER, CONFIG, ENV, SPLIT, STREAM, METRICS, MATRIX, CONFUSION, RESULT, REPORT, "mlflow.txt")
_CHECKPOINT = r"last\.ckpt(\.previous|\.damaged)?|best_\d{2,}_\d{3,}\.ckpt|task_\d{2,}\.safetensors"
_NAME = "|".join([*map(re.escape, _FILES), _CHECKPOINT])
_OURS = re.compile(
    rf"({'|'.join(map(re.escape, _FILES))})"
    rf"|{CHECKPOINTS}/({_CHECKPOINT})"
    rf"|({CHECKPOINTS}/)?\.({_NAME})\.(\d+\.)?writing"
    r"|tensorboard/events\.out\.tfevents\.[^/]+"
)
_WEIGHTS = re.compile(r"task_(\d{2,})\.safetensors")
_BEST = re.compile(r"best_\d{2,}_\d{3,}\.ckpt")


def weights_name(task: int) -> str:
    """The model after a task, below the run directory."""
    return f"{CHECKPOINTS}/task_{task:02}.safetensors"


def tasks_of(files: Iterable[str]) -> list[int]:
    """Tasks whose models are among files, in order."""
    return sorted([int(match[1]) for name in files if (match := _WEIGHTS.fullmatch(name.rpartition("/")[2]))])


def best_files(folder: Path) -> list[Path]:
    """Checkpoints of best epochs in a run directory."""
    return [path for path in (folder / CHECKPOINTS).glob("best_*") if _BEST.fullmatch(path.name)]


def our_files(folder: Path) -> list[Path]:
    """Files of a folder that bear the name of a run's file, the lock left out."""
    found = [*folder.glob("*"), *folder.glob(f"{CHECKPOINTS}/*"), *folder.glob("tensorboard/*")]
    files = [path for path in found if path.is_symlink() or not path.is_dir()]
    return sorted(path for path in files if _OURS.fullmatch(path.relative_to(folder).as_posix()))


def is_ours(name: str) -> bool:
    """Whether a path below a run directory is the name of a finished file of a run."""
    return _OURS.fullmatch(name) is not None and not name.endswith(".writing")


def is_unfinished_write(path: Path) -> bool:
    """Whether one of our files is a temporary one, left behind by a process that was killed."""
    return path.name.endswith(".writing")
