"""Reading arrays from elsewhere: what the header of an .npz claims is checked before memory is asked for."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from infssm._machine import memory_here
from infssm.data.files import require_regular
from infssm.errors import DataError

Array = np.ndarray[Any, Any]
_MAX_HEADER = 10_000
"""Bytes of the longest header that numpy reads."""


def read_npz(path: Path, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Array]:
    """The named arrays of a file; DataError if one is missing, damaged, pickled, or larger than the machine."""
    try:
        require_regular(path)
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if missing := [key for key in required if key not in names]:
                raise DataError(f"{path} lacks {', '.join(missing)}; it has {', '.join(names)}")
            sizes = {key: _claimed_bytes(archive, key) for key in (*required, *optional) if key in names}
            available = memory_here() or math.inf
            if sum(sizes.values()) > available:
                largest = max(sizes, key=lambda key: sizes[key])
                raise DataError(
                    f"{path} holds {sum(sizes.values()) / 2**30:.1f} GiB ({largest} alone "
                    f"{sizes[largest] / 2**30:.1f}), this machine has {available / 2**30:.1f}: save fewer or smaller "
                    "samples, or one folder per class"
                )
            arrays = {}
            for key in sizes:
                with archive.open(f"{key}.npy") as file:
                    arrays[key] = np.lib.format.read_array(file, allow_pickle=False)
                if arrays[key].dtype.kind == "U":
                    arrays[key].tolist()  # raises for code points that do not exist, which would fail later otherwise
            return arrays
    except DataError:
        raise
    except Exception as error:  # on damaged files zipfile and numpy raise almost anything, SyntaxError included
        reason = str(error) or type(error).__name__
        raise DataError(f"cannot read {path}: {reason}; save it again with numpy.savez") from error


def npz_names(path: Path) -> list[str]:
    """Names of the arrays of a file; none where it is not an .npz file."""
    try:
        require_regular(path)
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception:  # read_npz names the reason
        return []


def _claimed_bytes(archive: zipfile.ZipFile, key: str) -> int:
    """Bytes of an array by its header, which must equal the number of bytes that follow it."""
    member = archive.getinfo(f"{key}.npy")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        # numpy unpacks as many bytes as the header claims to have before it refuses a long one: check the claim first.
        start = file.tell()
        length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
        if length > _MAX_HEADER:
            raise ValueError(f"the header of {key} claims {length:,} bytes")
        file.seek(start)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        there = member.file_size - file.tell()
    if dtype.hasobject:
        raise ValueError(f"{key} holds Python objects: save plain numbers or strings")
    claimed = math.prod(shape) * dtype.itemsize
    if claimed != there:
        raise ValueError(f"{key} claims {list(shape)} of {dtype}, {claimed:,} bytes, but {there:,} follow")
    return claimed


def read_series(path: Path) -> dict[str, Array]:
    """The series of a file by name: one in an ``.npy`` or ``.csv``, all of ``x`` (and ``lengths``) in an ``.npz``.

    An ``.npy`` holds ``[time, width]``, a ``.csv`` a step per line without a heading, an ``.npz`` ``x: [n, time,
    width]`` as for training.
    """
    try:
        if path.suffix == ".npz":
            stored = read_npz(path, ("x",), ("lengths",))
            x, lengths = stored["x"], stored.get("lengths")
            if x.ndim < 2 or (lengths is not None and lengths.shape != x.shape[:1]):
                raise DataError(f"{path}: x must be [n, time, width], got {list(x.shape)}")
            cut = [x[i] if lengths is None else x[i, : int(lengths[i])] for i in range(len(x))]
            return {f"{path}[{i}]": values for i, values in enumerate(cut)}
        if path.suffix == ".npy":
            return {str(path): np.load(path, mmap_mode="r", allow_pickle=False)}
        if path.suffix == ".csv":
            return {str(path): np.loadtxt(path, delimiter=",", ndmin=2)}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    raise DataError(f"{path} is not a series: give an .npy or .csv [time, width], or an .npz with x [n, time, width]")
