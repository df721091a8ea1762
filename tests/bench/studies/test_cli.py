"""`infssm study` and what other commands show of studies and presets."""

import json

from infssm.cli.app import invoke


def test_the_list(capsys):
    assert invoke(["study"]) == 0
    shown = capsys.readouterr().out
    assert "penalty-alone" in shown
    assert len(shown.splitlines()) == 9


def test_a_study_prints_its_text_and_writes_its_files(tmp_path, capsys):
    assert invoke(["study", "invariance", "systems=2", "n=3", "-o", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Unchanged by any change of coordinates" in shown
    assert json.loads((tmp_path / "invariance.json").read_text())["systems"] == 2
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}


def test_a_study_of_a_run(trained_run, tmp_path, capsys):
    arguments = ["study", "drift", "kinds=martin", "images=4", "--run", str(trained_run), "-o", str(tmp_path)]
    assert invoke(arguments) == 0
    assert "seq, mean distance" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "drift.json").read_text())["distance_after_task"]) == ["martin"]


def test_options_named_like_sections_reach_the_study(tmp_path):
    arguments = ["study", "variance", "model=vim_nano", "images=1", "include_dt_bias=false", "-o", str(tmp_path)]
    assert invoke(arguments) == 0
    found = json.loads((tmp_path / "variance.json").read_text())
    assert len(found["rows"]) == 12
    assert found["include_dt_bias"] is False


def test_bad_usage(tmp_path, capsys):
    assert invoke(["study", "drift", "-o", str(tmp_path)]) == 2
    assert "--run" in capsys.readouterr().err
    assert invoke(["study", "nothing"]) == 2
    assert invoke(["study", "invariance", "wrong=1"]) == 2


def test_report_beside_the_paper(trained_run, tmp_path, capsys):
    page = tmp_path / "paper.html"
    assert invoke(["report", str(trained_run), "--paper", "-o", str(page)]) == 0
    assert "0 of 144 published rows measured" in capsys.readouterr().out
    assert "infssm run -p imagenet-r/5-task/inf-ssm --seed 0 10 100" in page.read_text()
    assert invoke(["report", str(trained_run), "--paper", "-f", "csv"]) == 2


def test_presets_are_listed_with_published_results(capsys):
    assert invoke(["list", "presets"]) == 0
    assert "ewc; paper, Table 6: AA" in capsys.readouterr().out


def test_dry_run_tells_what_it_would_cost(capsys):
    assert invoke(["run", "method=ewc", "train.batch_size=16", "model.options.depth=1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "name: ewc" in shown
    assert "GiB of memory" in shown
    assert "task 5: 2 classes" in shown


def test_a_preset_in_miniature(tmp_path, capsys):
    arguments = ["run", "-p", "cifar100/5-task/lwf-abc", "--fast-dev-run", "-q", "-o", str(tmp_path)]
    assert invoke(arguments) == 0
    assert "lwf-abc" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("result.json"))) == 1
