"""Headers of .npz files are checked before memory is asked for."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from infssm.data import npz
from infssm.data.npz import read_npz
from infssm.errors import DataError


def write(path, *, shape, content, version=(1, 0), descr="|u1"):
    """One member ``x`` whose header claims ``shape``, followed by ``content``."""
    header = io.BytesIO()
    form = {"descr": descr, "fortran_order": False, "shape": shape}
    (np.lib.format.write_array_header_1_0 if version == (1, 0) else np.lib.format.write_array_header_2_0)(header, form)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + content)
    return path


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_a_header_that_claims_more_than_there_is(tmp_path, version):
    path = write(tmp_path / "a.npz", shape=(33, 2**30), content=b"abc", version=version)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"x claims \[33, 1073741824\] of uint8, .* bytes, but 3 follow"):
            read_npz(path, ("x",))
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_an_array_larger_than_the_machine(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=np.zeros(5000, np.uint8), y=np.zeros(10, np.uint8))
    monkeypatch.setattr(npz, "memory_here", lambda: 5009)
    with pytest.raises(DataError, match=r"holds 0\.0 GiB \(x alone 0\.0\), this machine has 0\.0"):
        read_npz(tmp_path / "a.npz", ("x", "y"))
    assert read_npz(tmp_path / "a.npz", ("x",))["x"].shape == (5000,)
    monkeypatch.setattr(npz, "memory_here", lambda: None)
    assert set(read_npz(tmp_path / "a.npz", ("x",), ("y", "z"))) == {"x", "y"}


@pytest.mark.parametrize(
    ("shape", "content", "descr"),
    [((-1,), b"", "|u1"), ((2**70,), b"", "|u1"), ((2,), b"12", "|O"), ((1,), b"1", "?x")],
)
def test_bad_headers(tmp_path, shape, content, descr):
    with pytest.raises(DataError, match=r"cannot read .*a\.npz"):
        read_npz(write(tmp_path / "a.npz", shape=shape, content=content, descr=descr), ("x",))


def test_python_objects_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="x holds Python objects: save plain numbers or strings"):
        read_npz(write(tmp_path / "a.npz", shape=(2,), content=bytes(16), descr="|O"), ("x",))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\x93NUMPY\x09\x00\x10\x00{}", b"text"])
def test_members_that_are_no_arrays(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(DataError, match=r"cannot read .*a\.npz"):
        read_npz(tmp_path / "a.npz", ("x",))


@pytest.mark.parametrize("array", [np.array(["a", "bé"]), np.asfortranarray(np.eye(3)), np.array(5), np.zeros((0, 4))])
def test_reads_what_numpy_wrote(tmp_path, array):
    np.savez_compressed(tmp_path / "a.npz", x=array)
    read = read_npz(tmp_path / "a.npz", ("x",))["x"]
    assert read.dtype == array.dtype
    assert np.array_equal(read, array)
