"""Unpacking archives that mean harm, and broken ones."""

import io
import stat
import tarfile
import zipfile

import pytest

from infssm.data.fetching import extract
from infssm.errors import DataError


def tar(path, *members, mode="w"):
    """Members are (name, content) or TarInfo objects."""
    with tarfile.open(path, mode) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def everything(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_tar(tmp_path, mode):
    path = tar(
        tmp_path / "a.tar", special("d", tarfile.DIRTYPE), ("d/one.txt", b"1"), ("./d/e/two.txt", b"2"), mode=mode
    )
    extract(path, tmp_path / "out")
    assert everything(tmp_path / "out") == ["d", "d/e", "d/e/two.txt", "d/one.txt"]
    assert (tmp_path / "out" / "d" / "e" / "two.txt").read_bytes() == b"2"


def test_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("d/", "")
        archive.writestr("d/one.txt", "1" * 1000)
    extract(tmp_path / "a.zip", tmp_path / "out")
    assert (tmp_path / "out" / "d" / "one.txt").read_text() == "1" * 1000


ESCAPES = ["../evil", "d/../../evil", "/tmp/infssm-evil", "..\\evil", "C:\\evil", "C:evil", "\\\\host\\share\\evil"]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_paths_that_lead_outside_are_refused(tmp_path, kind, name):
    path = tmp_path / "inner" / f"a.{kind}"
    path.parent.mkdir()
    if kind == "tar":
        tar(path, (name, b"x"))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            info = zipfile.ZipInfo("placeholder")
            info.filename = name
            archive.writestr(info, "x")
    with pytest.raises(DataError, match="leads outside: refused"):
        extract(path, tmp_path / "inner" / "out")
    assert everything(tmp_path) == ["inner", f"inner/a.{kind}", "inner/out"]


@pytest.mark.parametrize(
    "member",
    [
        special("d", tarfile.SYMTYPE, "/etc"),
        special("d", tarfile.SYMTYPE, "../.."),
        special("d", tarfile.LNKTYPE, "/etc/passwd"),
        special("d", tarfile.CHRTYPE),
        special("d", tarfile.FIFOTYPE),
    ],
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path, member):
    path = tar(tmp_path / "a.tar", member, ("d/evil", b"x"))
    with pytest.raises(DataError, match="link or a device: refused"):
        extract(path, tmp_path / "out")
    assert everything(tmp_path / "out") == []


def test_links_in_a_zip_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("d")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc")
    with pytest.raises(DataError, match="link or a device: refused"):
        extract(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "zip"])
def test_truncated_archives(tmp_path, mode):
    content = bytes(range(256)) * 400
    path = tmp_path / "a"
    if mode == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("big", content)
    else:
        tar(path, ("big", content), mode=mode)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="truncated or damaged"):
        extract(path, tmp_path / "out")


def test_damaged_zip_content(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("big", b"a" * 1000)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="truncated or damaged"):
        extract(path, tmp_path / "out")


def test_a_file_where_a_folder_is_needed(tmp_path):
    path = tar(tmp_path / "a.tar", ("d", b"x"), ("d/e", b"x"))
    with pytest.raises(DataError, match="cannot unpack"):
        extract(path, tmp_path / "out")


@pytest.mark.parametrize(("local", "central", "value"), [(6, 8, 1), (8, 10, 99)], ids=["encrypted", "compression"])
def test_zip_files_that_cannot_be_unpacked(tmp_path, local, central, value):
    """A flag or a compression method that zipfile answers with a RuntimeError."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("one.txt", "1")
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[local] = content[content.index(b"PK\1\2") + central] = value
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match="truncated or damaged"):
        extract(tmp_path / "a.zip", tmp_path / "out")
