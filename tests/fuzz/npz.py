"""Damaged .npz files of images and of series, read as data sets and cut into batches."""

import io
import random
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np

from infssm.data import ImageLoader, SequenceLoader, TaskStream, load_dataset, make_split
from tests.fuzz import Tally, attempt, conclude
from tests.fuzz._mutation import mutate


def run(count: int, seed: int) -> None:
    rng = random.Random(seed)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        for number in range(count):
            path.write_bytes(_damaged(rng))
            attempt(tally, f"seed {seed} case {number}", lambda: _read(path))
    conclude(tally, "npz")


def _read(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns about names that occur twice
        dataset = load_dataset(str(path))
        task = TaskStream(dataset, make_split(dataset), 1)[0]
        if "x_train" in np.load(path).files:
            next(iter(ImageLoader(task, recipe="light", batch_size=4)))
        else:
            next(iter(SequenceLoader(task, batch_size=4)))


def _damaged(rng: random.Random) -> bytes:
    """An archive with random columns, damaged inside one array, in the archive, or only by columns that do not fit."""
    random_values = np.random.default_rng(rng.getrandbits(32))
    if rng.random() < 0.5:
        arrays = {
            "x_train": random_values.integers(0, 256, (12, 5, 5, 3), dtype=np.uint8),
            "y_train": np.arange(12) % 2,
            "x_test": random_values.integers(0, 256, (4, 5, 5, 3), dtype=np.uint8),
            "y_test": np.arange(4) % 2,
            "classes": np.array(["cat", "dog"]),
        }
    else:
        arrays = {
            "x": random_values.normal(size=(20, 6, 3)),
            "y": np.arange(20) % 2,
            "lengths": random_values.integers(1, 7, 20),
            "domain": np.array(["a", "b"] * 10),
            "test": np.arange(20) < 4,
        }
        for key in ("lengths", "domain", "test"):
            if rng.random() < 0.5:
                del arrays[key]
    where = rng.randrange(3)
    key = rng.choice(list(arrays))
    if where == 0:
        arrays[key] = rng.choice(_UNEXPECTED)
    buffer = io.BytesIO()
    compression = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=True)
            content = member.getvalue()
            archive.writestr(f"{name}.npy", mutate(content, rng) if where == 1 and name == key else content)
    return mutate(buffer.getvalue(), rng) if where == 2 else buffer.getvalue()


_UNEXPECTED = (
    np.array(5),
    np.zeros(0),
    np.zeros((20, 0, 3)),
    np.zeros((12, 0, 5, 3), np.uint8),
    np.arange(20) + 1_700_000_000,
    np.full(20, 2**64 - 1, np.uint64),
    np.full(12, -1),
    np.full((20, 6, 3), 1e300),
    np.full((20, 6, 3), np.nan),
    np.zeros((20, 6, 3), complex),
    np.array(["cat", "dog"] * 10),
    np.array([b"\xff", b"a"] * 10),
    np.array([{}, []] * 10, dtype=object),
    np.zeros(20, [("a", int), ("b", float)]),
    np.zeros(20, "datetime64[s]"),
    np.zeros(20, np.float16),
    np.full(20, np.nan),
    np.zeros((20, 2)),
    np.ones(20, np.longdouble),
)
