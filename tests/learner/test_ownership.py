"""Nothing that infssm did not write is ever removed, and nothing it wrote is read after it was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from infssm.bench.reports.report import write_reports
from infssm.errors import ConfigError, DataError
from infssm.learner.store.directory import RunDirectory, find_runs
from infssm.learner.store.layout import Manifest, best_files, digest_of, our_files, read_checked
from tests.bench.reports.fake import config, fake_run

FOREIGN = (
    "thesis.txt",
    "notes/config.yaml",
    "checkpoints/best_model.ckpt",
    "checkpoints/task_mine.safetensors",
    ".env",
)


def add_foreign(folder: Path) -> dict[Path, bytes]:
    for name in FOREIGN:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return {folder / name: name.encode() for name in FOREIGN}


def test_overwriting_removes_our_files_and_no_other(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    for name in ("last.ckpt", "last.ckpt.previous", "best_00_003.ckpt", "task_00.safetensors", ".last.ckpt.7.writing"):
        (run.checkpoints / name).write_text("ours")
    foreign = add_foreign(run.path)
    assert RunDirectory.create(run.path, overwrite=True).is_run
    assert {path: path.read_bytes() for path in foreign} == foreign
    left = {p.relative_to(run.path).as_posix() for p in run.path.rglob("*") if p.is_file()}
    assert left == {*FOREIGN, "run.json"}


def test_folder_of_the_user_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config("seq")))
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"not a run directory: it has no run\.json"):
        RunDirectory.open(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"holds config\.yaml, which a run would replace.*--out"):
            RunDirectory.create(tmp_path, overwrite=overwrite)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "thesis.txt"]


def test_folder_with_foreign_files_alone_can_be_used(tmp_path: Path) -> None:
    foreign = add_foreign(tmp_path)
    RunDirectory.create(tmp_path)
    assert all(path.read_bytes() == content for path, content in foreign.items())


def test_runs_from_before_the_marker_are_known_by_their_files(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    run.split_path.write_text("{}")
    (run.path / "run.json").unlink()
    assert RunDirectory.open(run.path).matrix().steps == 3
    (run.path / "env.json").unlink()
    with pytest.raises(ConfigError, match="not a run directory"):
        RunDirectory.open(run.path)


def test_an_earlier_run_gets_its_mark_when_it_goes_on(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a", complete=False)
    run.write_weights(0, b"weights")
    run.split_path.write_text("{}")
    (run.path / "run.json").unlink()
    run.adopt()
    manifest = Manifest.read(run.path)
    assert manifest is not None
    assert manifest.files["checkpoints/task_00.safetensors"] == (digest_of(b"weights"),)
    run.weights_path(0).write_bytes(b"weightz")
    with pytest.raises(DataError, match=r"task_00\.safetensors is damaged"):
        run.verify()


def test_names_that_are_ours(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    add_foreign(run.path)
    (run.checkpoints / "best_01_002.ckpt").write_text("")
    assert [p.name for p in best_files(run.path)] == ["best_01_002.ckpt"]
    assert not {run.path / name for name in FOREIGN} & set(our_files(run.path))


@pytest.mark.parametrize("name", ["env.json", "accuracy_matrix.csv", "result.json", "checkpoints/task_00.safetensors"])
def test_a_changed_file_is_refused(tmp_path: Path, name: str) -> None:
    run = fake_run(tmp_path / "a")
    run.write_weights(0, b"weights" * 100)
    path = run.path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged: its checksum is not the one in run\.json; restore it"):
        read_checked(path)
    with pytest.raises(DataError, match="is damaged"):
        run.verify()
    path.unlink()
    run.verify()


def test_killed_between_checksum_and_file(tmp_path: Path) -> None:
    """The checksum of the new content is written first: the old content is still good until the new one is there."""
    run = fake_run(tmp_path / "a")
    run.write_weights(0, b"old")
    manifest = Manifest.read(run.path)
    assert manifest is not None
    manifest.expecting("checkpoints/task_00.safetensors", digest_of(b"new")).write(run.path)
    assert read_checked(run.weights_path(0)) == b"old"
    run.weights_path(0).write_bytes(b"new")
    assert read_checked(run.weights_path(0)) == b"new"
    run.write_weights(0, b"newest")
    run.weights_path(0).write_bytes(b"old")
    with pytest.raises(DataError, match="damaged"):
        read_checked(run.weights_path(0))


def test_settings_that_do_not_count_may_be_edited(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    values = run.config()
    values["data"]["root"] = "/elsewhere"
    run.config_path.write_text(yaml.safe_dump(values))
    assert run.config()["data"]["root"] == "/elsewhere"
    values["seed"] = 7
    run.config_path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="was changed since the run began"):
        run.config()


def test_marker_of_a_newer_version(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    values = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(values | {"format": 99}))
    with pytest.raises(DataError, match="newer infssm"):
        run.config()


def test_reports_leave_out_damaged_runs_and_name_them(tmp_path: Path) -> None:
    good, bad = fake_run(tmp_path / "good"), fake_run(tmp_path / "bad")
    fake_run(tmp_path / "open", complete=False)
    (bad.path / "accuracy_matrix.csv").write_bytes(b"\0" * 40)
    readable, problems = write_reports(find_runs([tmp_path], complete=False))
    assert [run.path for run in readable] == [good.path]
    assert good.report_path.exists()
    assert "accuracy_matrix.csv is damaged" in problems[0]
    assert "1 unfinished" in problems[1]


def test_matrix_is_read_from_the_result_where_its_file_is_gone(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    matrix = run.matrix()
    run.write_json("result.json", {"aa": matrix.aa, "matrix": matrix.to_json()})
    (run.path / "accuracy_matrix.csv").unlink()
    assert run.matrix() == matrix
