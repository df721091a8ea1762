"""A run and a learner through a folder, and through a hub that is not there."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from infssm import Learner
from infssm.bench.running import run
from infssm.data import load_dataset
from infssm.errors import ConfigError
from infssm.learner import hub
from infssm.learner.hub import HubClassifier, HubLearner
from infssm.learner.predict import load_classifier as load
from tests.learner.taught import digits, taught
from tests.learner.tiny import tiny_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny_config(tmp_path_factory.mktemp("runs"), "ncm"), quiet=True).path


def test_folder_gives_the_same_answers(trained: Path, tmp_path: Path) -> None:
    HubClassifier(trained).save_pretrained(tmp_path / "saved")
    images = [pixels[0].numpy() for pixels in load_dataset("digits").images.pixels[:16]]
    expected = load(trained).predict(list(images))
    assert HubClassifier.from_pretrained(tmp_path / "saved").predict(list(images)) == expected
    assert load(tmp_path / "saved").predict(list(images)) == expected


def test_folder_holds_no_pickles_and_no_paths(trained: Path, tmp_path: Path) -> None:
    HubClassifier(trained, task=0).save_pretrained(tmp_path / "saved")
    files = {str(file.relative_to(tmp_path / "saved")) for file in (tmp_path / "saved").rglob("*") if file.is_file()}
    assert files == {
        *("run.json", "config.yaml", "config.json", "stream.json", "accuracy_matrix.csv", "result.json", "README.md"),
        "checkpoints/task_00.safetensors",
    }
    for name in files - {"checkpoints/task_00.safetensors"}:
        assert str(trained.parents[3]) not in (tmp_path / "saved" / name).read_text()
    assert len(HubClassifier.from_pretrained(tmp_path / "saved").classifier.classes) == 5


def test_card_says_what_was_trained_and_how_well(trained: Path, tmp_path: Path) -> None:
    HubClassifier(trained).save_pretrained(tmp_path / "saved")
    card = ModelCard.load(tmp_path / "saved" / "README.md")
    assert card.data.library_name == "infssm"
    assert "continual-learning" in card.data.tags
    values = run_matrix(trained)
    assert f"| 1 | {100 * values[1][0]:.1f} | {100 * values[1][1]:.1f} |" in card.text
    assert "`ncm`" in card.text or "`seq+ncm`" in card.text
    assert "infssm run -c config.yaml" in card.text


def run_matrix(path: Path) -> Any:
    from infssm.learner.store.directory import RunDirectory

    return RunDirectory(path).matrix().values


def test_only_a_new_folder_is_written_to(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        HubClassifier(trained).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub is a folder here: what is uploaded is what is downloaded."""
    shelf = tmp_path / "hub"

    def upload(_: HfApi, *, repo_id: str, folder_path: Path, **__: Any) -> str:
        shutil.copytree(folder_path, shelf / repo_id)
        return f"https://hub.example/{repo_id}"

    def download(repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert not any(pattern in ("*", "checkpoints/*") for pattern in allow_patterns)
        return str(shelf / repo_id)

    monkeypatch.setattr(HfApi, "create_repo", lambda _, repo_id, **__: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(
        "huggingface_hub.hub_mixin.hf_hub_download", lambda repo_id, filename, **_: str(shelf / repo_id / filename)
    )
    return shelf


def test_pushed_and_fetched(trained: Path, shelf: Path) -> None:
    assert HubClassifier(trained).push_to_hub("me/digits") == "https://hub.example/me/digits"
    image = load_dataset("digits").images.pixels[3, 0].numpy()
    assert HubClassifier.from_pretrained("me/digits").predict(image) == load(trained).predict(image)


def test_a_learner_goes_to_the_hub_and_learns_on(tmp_path: Path) -> None:
    learner = taught(tmp_path / "mine", classes=3)
    learner.learn(digits(3, 0, 8), "a <b> | c", name="odd | name")
    HubLearner(tmp_path / "mine").save_pretrained(tmp_path / "saved")
    files = {str(file.relative_to(tmp_path / "saved")) for file in (tmp_path / "saved").rglob("*") if file.is_file()}
    others = {name for name in files if not name.startswith("tensors/")}
    assert others == {"learner.json", "versions/000001.json", "config.json", "README.md"}  # one version alone
    assert str(tmp_path) not in "".join((tmp_path / "saved" / name).read_text() for name in others)
    images = list(digits(1, 60, 5))
    found = HubLearner.from_pretrained(tmp_path / "saved")
    assert found.predict(list(images)) == Learner.load(tmp_path / "saved").predict(list(images))
    for one, other in zip(found.predict(list(images)), learner.predict(list(images)), strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
    found.learner.learn(digits(4, 0, 8), "four")
    assert "four" not in Learner.load(tmp_path / "saved").classes  # a download is not changed
    card = ModelCard.load(tmp_path / "saved" / "README.md")
    assert card.data.pipeline_tag == "image-classification"
    assert "| lesson of 0 |" in card.text
    assert "digit 2 (40)" in card.text
    assert "| odd &#124; name |" in card.text
    assert f"| {100 * learner.history[0].score:.1f} % |" in card.text
    assert "<b>" not in card.text


def test_a_learner_is_pushed_and_fetched(shelf: Path) -> None:
    learner = taught(classes=2, count=8)
    assert HubLearner(learner).push_to_hub("me/digits") == "https://hub.example/me/digits"
    image = digits(1, 60, 1)[0]
    found = HubLearner.from_pretrained("me/digits").learner
    assert found.predict(image).probabilities == pytest.approx(learner.predict(image).probabilities, abs=1e-5)
    assert found.history == learner.history
