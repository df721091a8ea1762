"""What `infssm run` and `infssm eval` say about a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from infssm.cli.app import invoke
from tests.learner.tiny import TINY


def test_a_run_on_validation_data_in_a_folder_named_like_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "method": "seq"}))
    out = tmp_path / "[/] [bold]"
    arguments = ["-c", str(tmp_path / "tiny.yaml"), "-o", str(out), "-q", "data.evaluate=val"]
    assert invoke(["run", *arguments]) == 0
    shown = capsys.readouterr().out
    assert f"report: {out}" in shown
    assert "vim_nano, on validation data" in shown

    (run,) = [path.parent for path in out.rglob("result.json")]
    table = tmp_path / "predictions.csv"
    assert invoke(["eval", str(run), "--predictions", str(table)]) == 0
    assert "on validation data" in capsys.readouterr().out
    assert invoke(["eval", str(run), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len({row["sample"] for row in rows}) == len(rows) == sum(score["images"] for score in scores)
    for task, score in enumerate(scores):
        correct = [row["correct"] == "True" for row in rows if row["task"] == str(task)]
        assert sum(correct) / len(correct) == pytest.approx(score["class_incremental"])
    assert all((row["true"] == row["predicted"]) == (row["correct"] == "True") for row in rows)
    assert all(0 < float(row["probability"]) <= 1 for row in rows)
