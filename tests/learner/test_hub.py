"""A run through a folder, and through a hub that is not there."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from infssm.bench.running import run
from infssm.data import load_dataset
from infssm.errors import ConfigError
from infssm.learner import hub
from infssm.learner.hub import HubClassifier
from infssm.learner.predict import load_classifier as load
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


def test_pushed_and_fetched(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is a folder here: what is uploaded is what is downloaded."""
    import shutil
    from types import SimpleNamespace

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
    assert HubClassifier(trained).push_to_hub("me/digits") == "https://hub.example/me/digits"
    image = load_dataset("digits").images.pixels[3, 0].numpy()
    assert HubClassifier.from_pretrained("me/digits").predict(image) == load(trained).predict(image)
