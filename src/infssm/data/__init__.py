"""Data sets, splits saved as data, task streams, transforms."""

from infssm._batch import Batch
from infssm._modality import Modality, Sequential, register_modality
from infssm.data import sets as sets
from infssm.data.augmentation import Mixing, StrongRecipe, make_mixing, strong_recipe
from infssm.data.dataset import (
    Archive,
    Dataset,
    DatasetEntry,
    find_unreadable,
    list_datasets,
    load_dataset,
    register_dataset,
    require_readable,
)
from infssm.data.facts import ExportedInput, SampleFacts, StreamFacts
from infssm.data.fetching import CheckReport, check, fetch
from infssm.data.files import data_root
from infssm.data.images import ArrayImages, FileImages, ImageFacts
from infssm.data.loader import ImageLoader, SequenceLoader
from infssm.data.recipes import LightRecipe, PerImageRecipe, Recipe, Stats, list_recipes, make_recipe
from infssm.data.sequences import (
    ArraySequences,
    MeasuredSeries,
    SequenceFacts,
    Sequences,
    SoundFacts,
    SoundFiles,
    Spectra,
    TokenFacts,
    Tokens,
    in_bands,
)
from infssm.data.sets.generated import write_synthetic
from infssm.data.split import Split, few_shots, make_split
from infssm.data.stream import Task, TaskData, TaskStream, in_stream_order

__all__ = [
    "Archive",
    "ArrayImages",
    "ArraySequences",
    "Batch",
    "CheckReport",
    "Dataset",
    "DatasetEntry",
    "ExportedInput",
    "FileImages",
    "ImageFacts",
    "ImageLoader",
    "LightRecipe",
    "MeasuredSeries",
    "Mixing",
    "Modality",
    "PerImageRecipe",
    "Recipe",
    "SampleFacts",
    "SequenceFacts",
    "SequenceLoader",
    "Sequences",
    "Sequential",
    "SoundFacts",
    "SoundFiles",
    "Spectra",
    "Split",
    "Stats",
    "StreamFacts",
    "StrongRecipe",
    "Task",
    "TaskData",
    "TaskStream",
    "TokenFacts",
    "Tokens",
    "check",
    "data_root",
    "fetch",
    "few_shots",
    "find_unreadable",
    "in_bands",
    "in_stream_order",
    "list_datasets",
    "list_recipes",
    "load_dataset",
    "make_mixing",
    "make_recipe",
    "make_split",
    "register_dataset",
    "register_modality",
    "require_readable",
    "strong_recipe",
    "write_synthetic",
]
