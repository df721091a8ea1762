"""``infssm predict`` on folders, series and bad files, and ``--import`` of a user's own code."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import infssm
import infssm.models
from infssm.bench.running import run
from infssm.cli.app import invoke
from infssm.data import ArrayImages, Dataset
from infssm.errors import ConfigError, DataError
from infssm.learner.store.directory import RunDirectory
from tests.learner.sequences import config, series_file
from tests.learner.tiny import tiny_config


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny_config(tmp_path_factory.mktemp("runs")), quiet=True).path


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waves")
    return run(config(str(series_file(folder)), folder / "runs"), quiet=True).path


def test_a_folder_is_classified_and_a_bad_file_is_named(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos" / "below").mkdir(parents=True)
    for name in ("a.png", "below/c.PNG"):
        Image.fromarray(np.full((9, 9), 100, np.uint8)).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "b.png").write_bytes(b"this is no image")
    (tmp_path / "photos" / "notes.txt").write_text("not for the model")
    assert invoke(["predict", str(digits), str(tmp_path / "photos"), "--json"]) == 3
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [Path(line["file"]).name for line in lines] == ["a.png", "b.png", "c.PNG"]
    assert ["error" in line for line in lines] == [False, True, False]
    assert "b.png" in said.err
    assert "1 could not be classified" in said.err
    (tmp_path / "empty").mkdir()
    assert invoke(["predict", str(digits), str(tmp_path / "empty")]) == 2
    assert invoke(["predict", str(digits), str(tmp_path / "none")]) == 3
    assert "there is no file or folder" in capsys.readouterr().err


def test_files_of_series_are_classified(waves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    one = draw.normal(size=(7, 3))
    np.save(tmp_path / "one.npy", one)
    np.savetxt(tmp_path / "one.csv", one, delimiter=",")
    np.savez(tmp_path / "two.npz", x=np.stack([one, one]), lengths=[7, 5])
    np.save(tmp_path / "nan.npy", np.where(np.arange(7)[:, None] == 3, np.nan, one))
    (tmp_path / "bad.csv").write_text("no,numbers\n")
    assert invoke(["predict", str(waves), str(tmp_path), "--json"]) == 3
    said = capsys.readouterr()
    lines = {Path(line["file"]).name: line for line in map(json.loads, said.out.splitlines())}
    assert lines["one.npy"]["label"] == lines["one.csv"]["label"] == lines["two.npz[0]"]["label"]
    assert set(lines) == {"one.npy", "one.csv", "two.npz[0]", "two.npz[1]", "nan.npy", "bad.csv"}
    assert "3 of 21 values are NaN or infinite" in lines["nan.npy"]["error"]
    assert "cannot read" in lines["bad.csv"]["error"]


def test_values_that_are_not_finite_are_no_class(waves: Path) -> None:
    classifier = infssm.load(waves)
    for value in (np.nan, np.inf):
        with pytest.raises(DataError, match="NaN or infinite"):
            classifier.predict(np.full((6, 3), value))
    with torch.no_grad():
        next(classifier.model.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match="no finite logits"):
        classifier.predict(np.ones((6, 3)))


def test_two_classes_of_one_name_are_refused(digits: Path, tmp_path: Path) -> None:
    pixels = ArrayImages(torch.zeros(4, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(DataError, match="two classes are named 'a'"):
        Dataset("own", ("a", "b", "a"), pixels, np.array([0, 1, 2, 0]))
    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    stream = json.loads((copy / "stream.json").read_text())
    stream["classes"][1] = stream["classes"][0]
    RunDirectory(copy).write_json("stream.json", stream)
    with pytest.raises(DataError, match="has two classes of one name"):
        infssm.load(copy)


def test_a_device_that_is_not_there_is_an_error_of_one_line(digits: Path) -> None:
    with pytest.raises(ConfigError, match="device='cuda:77' cannot be used on this machine") as caught:
        infssm.load(digits, device="cuda:77")
    assert "\n" not in str(caught.value)


def test_a_run_is_tested_on_other_data(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label, name in enumerate(infssm.load(digits).classes):
        (tmp_path / name).mkdir()
        for n in range(2):
            Image.fromarray(np.full((9, 9), 20 * label + n, np.uint8)).save(tmp_path / name / f"{n}.png")
    assert invoke(["eval", str(digits), str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (sum(found["samples"].values()), found["unknown"]) == (20, 0)  # a run is not calibrated


MINE = """
import numpy as np
import infssm
from infssm.data import ArrayImages, Dataset
import torch

@infssm.register_model("{name}_model")
def model(**options):
    "A model of my own."
    return infssm.create_model("vim_nano", **{{**options, "depth": 1, "embed_dim": 16, "patch_size": 4}})

@infssm.register_dataset("{name}-set", summary="Stripes of my own.")
def stripes(root, **options):
    labels = np.arange(80) % 4
    pixels = torch.zeros(80, 1, 8, 8, dtype=torch.uint8)
    for i, label in enumerate(labels):
        pixels[i, :, label * 2] = 200
    return Dataset("{name}-set", ("a", "b", "c", "d"), ArrayImages(pixels), labels, stratified=True)
"""


def test_own_code_is_imported_by_every_command_that_builds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFSSM_IMPORT", raising=False)
    file = tmp_path / "striped_code.py"
    file.write_text(MINE.format(name="striped"))
    assert invoke(["list", "models", "--import", str(file)]) == 0
    assert "A model of my own." in capsys.readouterr().out
    assert invoke(["list", "datasets", "--import", str(file)]) == 0
    assert "Stripes of my own." in capsys.readouterr().out
    settings = ["data=striped-set", "data.num_tasks=2", "model=striped_model", "method=seq", "train.epochs=1"]
    settings += ["train.batch_size=8", "train.limit_batches=2", "model.options={}"]
    out = tmp_path / "runs"
    assert invoke(["run", *settings, "--import", str(file), "-o", str(out), "-q"]) == 0
    path = next(out.rglob("run.json")).parent
    assert invoke(["eval", str(path), "--import", str(file)]) == 0
    capsys.readouterr()
    bad = tmp_path / "broken_code.py"
    bad.write_text("x = 1\nraise KeyError('nothing')\n")
    assert invoke(["list", "models", "--import", str(bad)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "broken_code.py, line 2: KeyError: 'nothing'" in said
    assert "Traceback" not in said
    assert invoke(["list", "models", "--import", str(tmp_path / "none.py")]) == 2
    sys.modules.pop("striped_code")


def test_a_run_is_compressed(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.png", "c.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8)).save(tmp_path / "photos" / name)
    call = ["compress", str(digits), str(tmp_path / "photos"), "--out", str(tmp_path / "small"), "--steps", "2"]
    assert invoke(call) == 2  # neither --states nor --share
    assert invoke([*call, "--states", "2"]) == 0
    assert "parameters instead of" in capsys.readouterr().out
    small = infssm.models.from_pretrained(tmp_path / "small")
    assert small(infssm.load(digits).transform([tmp_path / "photos" / "a.png"])).isfinite().all()
    assert invoke([*call, "--states", "2"]) == 2  # the folder exists
    capsys.readouterr()
    layers = len(infssm.ssm.find_mixers(small))
    for folder in (digits, tmp_path / "small"):
        assert invoke(["doctor", str(folder)]) == 0
        assert f"{layers} of {layers} state space layers have a trained parameter" in capsys.readouterr().out
