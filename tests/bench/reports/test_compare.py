from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infssm.bench.reports import compare
from infssm.bench.reports.tables import render
from infssm.errors import ConfigError
from infssm.learner.store.directory import find_runs
from tests.bench.reports.fake import fake_run


def three_methods(root: Path) -> None:
    for seed, shift in ((0, 0.0), (10, 0.1)):
        fake_run(root / f"seq{seed}", "seq", seed, shift=shift - 0.1)
        fake_run(root / f"ewc{seed}", "ewc", seed, shift=shift - 0.2)
        fake_run(root / f"inf{seed}", "inf-ssm-exact", seed, shift=shift)


def test_rows_are_means_over_seeds(tmp_path: Path) -> None:
    three_methods(tmp_path)
    comparison = compare(find_runs([tmp_path]))
    assert sorted(row.label for row in comparison.rows) == ["ewc", "inf-ssm-exact", "seq"]
    row = next(row for row in comparison.rows if row.label == "inf-ssm-exact")
    assert sorted(row.seeds) == [0, 10]
    base = (0.3 + 0.6 + 0.7) / 3
    assert row.measures["aa"].mean == pytest.approx(base + 0.05)
    assert row.measures["aa"].std == pytest.approx(0.1 / 2**0.5)
    assert row.aa_curve == pytest.approx([95.0, 70.0, 100 * (base + 0.05)])
    assert row.forgetting == pytest.approx([60.0, 20.0])


def test_verdict_is_computed(tmp_path: Path) -> None:
    for seed, shift in ((0, 0.0), (10, 0.02)):
        fake_run(tmp_path / f"seq{seed}", "seq", seed, shift=shift - 0.1)
        fake_run(tmp_path / f"ewc{seed}", "ewc", seed, shift=shift - 0.2)
        fake_run(tmp_path / f"inf{seed}", "inf-ssm-exact", seed, shift=shift)
    verdict = compare(find_runs([tmp_path])).verdict()
    assert verdict.startswith("inf-ssm-exact has the highest AA: 54.3 % against 44.3 %")
    assert "(+10.0 points)" in verdict
    assert verdict.endswith("points; ewc is below seq.")


def test_verdict_within_noise_over_seeds(tmp_path: Path) -> None:
    """Standard deviation 0.1/√2 over two seeds: two standard errors of a difference are 0.1·√2 = 0.141."""
    three_methods(tmp_path)
    verdict = compare(find_runs([tmp_path])).verdict()
    assert "; seq cannot be told from it (AA within two standard errors over seeds)." in verdict
    assert "below seq" not in verdict


@pytest.mark.parametrize(("shift", "alike"), [(-0.02, True), (-0.23, True), (-0.24, False)])
def test_verdict_within_noise_of_one_seed(tmp_path: Path, shift: float, alike: bool) -> None:
    """Accuracies p = 0.3, 0.6, 0.7 of 10 images each and the shifted ones, by the binomial formula."""
    fake_run(tmp_path / "a", "ewc")
    fake_run(tmp_path / "b", "er", shift=shift)
    rows = [[p + s for p in (0.3, 0.6, 0.7)] for s in (0.0, shift)]
    error = sum(p * (1 - p) / 10 for row in rows for p in row) ** 0.5 / 3
    assert (-shift <= 2 * error) == alike
    clause = "; er cannot be told from it (AA within two standard errors of one seed's test images)."
    assert compare(find_runs([tmp_path])).verdict().endswith(clause) == alike


def test_verdict_of_one_seed_without_image_counts(tmp_path: Path) -> None:
    for name, shift in (("er", 0.0), ("ewc", -0.3)):
        run = fake_run(tmp_path / name, name, shift=shift)
        table = run.path / "accuracy_matrix.csv"
        run.write_text(table.name, table.read_text().replace(",10.0,", ",,"))
    assert compare(find_runs([tmp_path])).verdict().endswith("; one seed, so differences may be noise.")


def test_verdict_when_nothing_helps(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "seq", shift=0.1)
    fake_run(tmp_path / "b", "ewc")
    verdict = compare(find_runs([tmp_path])).verdict()
    assert verdict.startswith("No method beats plain sequential training here")
    assert "; ewc cannot be told from it" in verdict


def test_verdict_lists_many(tmp_path: Path) -> None:
    for name in ("seq", "ewc", "si", "mas"):
        fake_run(tmp_path / name, name, shift=0.01 * (name == "si"))
    assert re.search(
        "; (seq|ewc|mas), (seq|ewc|mas) and (seq|ewc|mas) cannot", compare(find_runs([tmp_path])).verdict()
    )


def test_verdict_without_seq(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "er")
    fake_run(tmp_path / "b", "ewc", shift=0.1)
    assert "ewc has the highest AA (63.3 %)" in compare(find_runs([tmp_path])).verdict()


def test_set_ups_of_one_method_are_told_apart(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "ewc", weight=1.0, gamma=0.5)
    fake_run(tmp_path / "b", "ewc", weight=100.0, gamma=0.5)
    labels = [row.label for row in compare(find_runs([tmp_path])).rows]
    assert labels == ["ewc (weight=1.0)", "ewc (weight=100.0)"]


def test_benchmarks_are_apart(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "seq")
    fake_run(tmp_path / "b", "seq", data="cifar100")
    comparison = compare(find_runs([tmp_path]))
    assert comparison.benchmarks == ["digits, 3 tasks, vim_nano", "cifar100, 3 tasks, vim_nano"]
    assert render(comparison, "md").count("###") == 2


def test_markdown(tmp_path: Path) -> None:
    three_methods(tmp_path)
    text = render(compare(find_runs([tmp_path])), "md")
    assert "| method | seeds | AA | AIA | FM | task-inc. AA |" in text
    line = next(line for line in text.splitlines() if line.startswith("| inf-ssm-exact"))
    assert "**58.33 ± 7.07**" in line
    assert line.startswith("| inf-ssm-exact | 2 |")


def test_csv(tmp_path: Path) -> None:
    three_methods(tmp_path)
    rows = list(csv.DictReader(io.StringIO(render(compare(find_runs([tmp_path])), "csv"))))
    row = next(row for row in rows if row["method"] == "seq")
    assert float(row["aa_mean"]) == pytest.approx((0.3 + 0.6 + 0.7) / 3 - 0.05)
    assert float(row["fm_mean"]) == pytest.approx(0.4)
    assert row["seeds"] == "0 10"


def test_latex(tmp_path: Path) -> None:
    three_methods(tmp_path)
    text = render(compare(find_runs([tmp_path])), "tex")
    assert text.count(r"\begin{tabular}{lrrrrr}") == text.count(r"\end{tabular}") == 1
    assert r"\textbf{58.33 $\pm$ 7.07}" in text
    assert "vim_nano" in text.splitlines()[0]
    assert all(line.endswith(r"\\") for line in text.splitlines() if " & " in line)


def test_json(tmp_path: Path) -> None:
    three_methods(tmp_path)
    data = json.loads(render(compare(find_runs([tmp_path])), "json"))
    assert {row["method"] for row in data["rows"]} == {"seq", "ewc", "inf-ssm-exact"}
    assert data["rows"][0]["measures"]["aa"]["std"] == pytest.approx(0.1 / 2**0.5)
    assert data["verdict"]


def test_html(tmp_path: Path) -> None:
    three_methods(tmp_path)
    text = render(compare(find_runs([tmp_path])), "html")
    assert text.count('role="img"') == 5
    assert text.count("polyline") == 2 * 3
    assert '<td class="best">58.33 ±&nbsp;7.07</td>' in text
    assert "<script" not in text


def test_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="no complete runs"):
        compare([])


def test_unlike_runs_are_never_ranked_against_each_other(tmp_path: Path) -> None:
    for epochs, shift in ((1, 0.0), (50, 0.1)):
        for method in ("seq", "lwf-ac"):
            run = fake_run(tmp_path / f"{method}{epochs}", method, shift=shift)
            config = run.config()
            config["train"]["epochs"] = epochs
            run.write_text("config.yaml", yaml.safe_dump(config))
    found = compare(find_runs([tmp_path]))
    assert [row.label for row in found.rows] == ["lwf-ac", "seq", "lwf-ac", "seq"]
    names = [f"digits, 3 tasks, vim_nano (train.epochs={e})" for e in (1, 50)]
    assert sorted(found.benchmarks) == names
    assert all(len(found.of(name)) == 2 for name in names)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_table_at_80_columns_shows_every_number(tmp_path: Path, encoding: str) -> None:
    """With long labels, on terminals that know "±" and on those that do not."""
    for weight in (1.0, 123456789.125):
        for seed in (0, 1):
            path = tmp_path / f"{weight}-{seed}"
            fake_run(path, "inf-ssm-exact", seed, shift=seed / 100, distance="martin+0.125*c", weight=weight)
    done = subprocess.run(
        [sys.executable, "-m", "infssm", "report", str(tmp_path)],
        capture_output=True,
        env=os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        check=False,
    )
    text = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    assert max(map(len, text.splitlines()[:-1])) <= 80  # the last line is a sentence
    sign = "±" if encoding == "utf-8" else "+-"
    assert text.count(f"53.8 {sign} 0.7") == 2
    assert "…" not in text
