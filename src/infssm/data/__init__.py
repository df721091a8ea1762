"""Data sets, splits saved as data, task streams, transforms."""

from infssm.data import sets as sets
from infssm.data.dataset import ImageDataset
from infssm.data.images import ArrayImages, FileImages
from infssm.data.registry import (
    Archive,
    DatasetEntry,
    data_root,
    list_datasets,
    load_dataset,
    register_dataset,
)
from infssm.data.split import Split, make_split
from infssm.data.stream import Task, TaskData, TaskStream

__all__ = [
    "Archive",
    "ArrayImages",
    "DatasetEntry",
    "FileImages",
    "ImageDataset",
    "Split",
    "Task",
    "TaskData",
    "TaskStream",
    "data_root",
    "list_datasets",
    "load_dataset",
    "make_split",
    "register_dataset",
]
