"""Runs sent from machine to machine: whole, continued as if never moved, and nothing but runs."""

import io
import zipfile
from pathlib import Path

import pytest

from infssm.bench.running import run, run_path
from infssm.errors import ConfigError, DataError
from infssm.learner.config.load import to_yaml
from infssm.learner.events import Interrupted
from infssm.learner.result import Result
from infssm.learner.store import layout
from infssm.learner.store.directory import RunDirectory, pack, unpack
from infssm.learner.store.layout import Manifest
from tests.learner.test_resume import broken_at, signalled
from tests.learner.tiny import assert_same, tiny_config


def parcel_of(**files: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, value in ({layout.MARKER: b"[]"} | files).items():
            archive.writestr(name, value)
    return content.getvalue()


def test_an_unfinished_run_continues_where_it_was_sent(tmp_path: Path) -> None:
    here, there = tiny_config(tmp_path / "here"), tiny_config(tmp_path / "there")
    with broken_at(9, signalled), pytest.raises(Interrupted):
        run(here, quiet=True)
    sent = RunDirectory(run_path(there))
    unpack(sent, pack(RunDirectory(run_path(here))), to_yaml(there))
    assert not sent.complete
    sent.verify()
    assert_same(run(there, quiet=True), run(tiny_config(tmp_path / "alone"), quiet=True))


def test_later_parcels_hold_what_changed(tmp_path: Path) -> None:
    here, there = tiny_config(tmp_path / "here"), tiny_config(tmp_path / "there")
    run(here, quiet=True)
    source, sent, known = RunDirectory(run_path(here)), RunDirectory(run_path(there)), dict[str, str]()
    (source.path / "notes.txt").write_text("mine")
    unpack(sent, pack(source, known), to_yaml(there))
    assert_same(Result.load(sent.path), Result.load(source.path))
    assert Manifest.read(sent.path).files.keys() == Manifest.read(source.path).files.keys() - {layout.REPORT}
    assert Result.load(sent.path).config.out == str(tmp_path / "there")
    assert not (sent.path / "notes.txt").exists()
    with zipfile.ZipFile(io.BytesIO(pack(source, known))) as archive:
        assert archive.namelist() == [layout.MARKER]


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "notes.txt", "checkpoints/../../x", "run.json.writing", "lock", ".result.json.1.writing"]
)
def test_only_files_of_a_run_are_written(tmp_path: Path, name: str) -> None:
    target = RunDirectory(tmp_path / "a" / "b")
    with pytest.raises(DataError, match="not a file of a run"):
        unpack(target, parcel_of(**{layout.RESULT: b"{}", name: b"x"}), "seed: 0\n")
    assert not (tmp_path / "a").exists()


# Named, because a zip's bytes hold the time and would make another id in every process that collects the tests.
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nothing",
        parcel_of()[:-30],
        parcel_of(**{layout.MARKER: b"{"}),
        parcel_of(**{layout.MARKER: b"1"}),
        parcel_of(**{layout.MARKER: b"[[1]]"}),
        parcel_of(**{layout.MARKER: b"[" * 100_000}),
        parcel_of().replace(b"PK\1\2\x14\x03\x14", b"PK\1\2\x14\x03\xff"),
    ],
    ids=["empty", "text", "cut off", "half a marker", "number", "lists", "deep", "newer zip"],
)
def test_what_is_no_parcel(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="is not a run"):
        unpack(RunDirectory(tmp_path / "a"), content, "seed: 0\n")


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / layout.RESULT).write_text("mine")
    with pytest.raises(ConfigError, match="choose another folder"):
        unpack(RunDirectory(tmp_path), parcel_of(), "seed: 0\n")
    assert (tmp_path / layout.RESULT).read_text() == "mine"
