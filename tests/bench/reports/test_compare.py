from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from markupsafe import escape
from rich.console import Console

from infssm.bench.reports import FORMATS, Comparison, compare, paired_tests, write_comparison
from infssm.cli.report import print_comparison
from infssm.errors import ConfigError
from infssm.learner.store.directory import RunDirectory, find_runs
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
    assert row.metrics["aa"].mean == pytest.approx(base + 0.05)
    assert row.metrics["aa"].std == pytest.approx(0.1 / 2**0.5)
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


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_verdict_when_nothing_helps(tmp_path: Path, shift: float) -> None:
    fake_run(tmp_path / "b", "seq", shift=shift)
    fake_run(tmp_path / "a", "ewc")
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
    assert list(comparison.benchmarks) == ["digits, 3 tasks, vim_nano", "cifar100, 3 tasks, vim_nano"]
    assert FORMATS["md"](comparison).count("###") == 2


def test_markdown(tmp_path: Path) -> None:
    three_methods(tmp_path)
    text = FORMATS["md"](compare(find_runs([tmp_path])))
    assert "| method | seeds | AA | AIA | FM | task-inc. AA |" in text
    line = next(line for line in text.splitlines() if line.startswith("| inf-ssm-exact"))
    assert "**58.33 ± 7.07**" in line
    assert line.startswith("| inf-ssm-exact | 2 |")


def test_csv(tmp_path: Path) -> None:
    three_methods(tmp_path)
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](compare(find_runs([tmp_path]))))))
    row = next(row for row in rows if row["method"] == "seq")
    assert float(row["aa_mean"]) == pytest.approx((0.3 + 0.6 + 0.7) / 3 - 0.05)
    assert float(row["fm_mean"]) == pytest.approx(0.4)
    assert row["seeds"] == "0 10"


def test_latex(tmp_path: Path) -> None:
    three_methods(tmp_path)
    text = FORMATS["tex"](compare(find_runs([tmp_path])))
    assert text.count(r"\begin{tabular}{lrrrrr}") == text.count(r"\end{tabular}") == 1
    assert r"\textbf{58.33 $\pm$ 7.07}" in text
    assert "vim_nano" in text.splitlines()[0]
    assert all(line.endswith(r"\\") for line in text.splitlines() if " & " in line)


def test_json(tmp_path: Path) -> None:
    three_methods(tmp_path)
    data = json.loads(FORMATS["json"](compare(find_runs([tmp_path]))))
    assert {row["method"] for row in data["rows"]} == {"seq", "ewc", "inf-ssm-exact"}
    assert data["rows"][0]["measures"]["aa"]["std"] == pytest.approx(0.1 / 2**0.5)
    assert data["verdict"]


def test_html(tmp_path: Path) -> None:
    three_methods(tmp_path)
    text = FORMATS["html"](compare(find_runs([tmp_path])))
    assert text.count('role="img"') == 5
    assert text.count("polyline") == 2 * 3
    assert '<td class="best">58.33 ±\u00a07.07</td>' in text
    assert "<script" not in text


def test_a_seed_is_counted_once(tmp_path: Path) -> None:
    """Alone, a method trains task 0 itself; in a grid it takes the weights of another run. It is one seed."""
    fake_run(tmp_path / "alone", "er", 0)
    fake_run(tmp_path / "in-a-grid", "er", 0, shift=0.1, train={"task0": "seq/task_00.safetensors"})
    fake_run(tmp_path / "other-seed", "er", 10)
    comparison = compare(find_runs([tmp_path]))
    (row,) = comparison.rows
    assert row.seeds == (0, 10)
    assert row.metrics["aa"].mean == pytest.approx(1.6 / 3)
    (reason,) = comparison.left_out
    assert f"left out {tmp_path / 'in-a-grid'}: seed 0 of er is counted already, by {tmp_path / 'alone'}" in reason
    assert "differs only in train.task0 (train, here seq/task_00.safetensors)" in reason
    assert reason in json.loads(FORMATS["json"](comparison))["left_out"]


def test_runs_on_different_data_are_apart(tmp_path: Path) -> None:
    """The same settings before and after photos were added: the fingerprint stored with the split differs."""
    for name, seed, fingerprint in (("a", 0, "1" * 16), ("b", 10, "1" * 16), ("c", 100, "2" * 16)):
        run = fake_run(tmp_path / name, "er", seed)
        run.write_json("split.json", {"fingerprint": fingerprint})
    comparison = compare(find_runs([tmp_path]))
    assert [row.seeds for row in comparison.rows] == [(0, 10), (100,)]
    assert list(comparison.benchmarks) == [f"digits, 3 tasks, vim_nano (data.fingerprint={8 * d})" for d in "12"]


def test_a_narrower_comparison_removes_nothing(tmp_path: Path) -> None:
    three_methods(tmp_path)
    write_comparison(find_runs([tmp_path]), tmp_path)
    _, page = write_comparison([RunDirectory(tmp_path / "ewc0")], tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    assert {row["method"]: row["seeds"] for row in rows} == dict.fromkeys(("ewc", "inf-ssm-exact", "seq"), "0 10")
    assert "inf-ssm-exact" in page.read_text()


def test_weights_are_sorted_as_numbers_and_training_settings_shown_for_all(tmp_path: Path) -> None:
    for i, weight in enumerate((100.0, 1e-3, 20.0)):
        fake_run(tmp_path / f"{i}", "ewc", weight=weight, train={"lr": 0.01})
    fake_run(tmp_path / "3", "ewc", weight=20.0, train={"lr": 0.001})
    fake_run(tmp_path / "4", "seq", train={"lr": 0.01})
    assert [row.label for row in compare(find_runs([tmp_path])).rows] == [
        "ewc (weight=0.001, train.lr=0.01)",
        "ewc (weight=20.0, train.lr=0.001)",
        "ewc (weight=20.0, train.lr=0.01)",
        "ewc (weight=100.0, train.lr=0.01)",
        "seq (train.lr=0.01)",
    ]


def test_each_table_has_its_own_verdict(tmp_path: Path) -> None:
    for data, shift in (("digits", 0.1), ("cifar100", -0.1)):
        fake_run(tmp_path / f"{data}-seq", "seq", data=data)
        fake_run(tmp_path / f"{data}-er", "er", data=data, shift=shift)
    comparison = compare(find_runs([tmp_path]))
    lines = comparison.verdict().splitlines()
    assert [line.partition(":")[0] for line in lines] == list(comparison.benchmarks)
    html = FORMATS["html"](comparison)
    assert html.count('class="verdict"') == 2
    positions = [html.index(text) for b, v in comparison.verdicts.items() for text in (escape(v), f"<h2>{b}</h2>")]
    assert positions == sorted(positions)
    buffer = io.StringIO()
    print_comparison(comparison, Console(file=buffer, width=300))
    assert [line for line in buffer.getvalue().splitlines() if line in comparison.verdicts.values()] == [
        *comparison.verdicts.values()
    ]


def test_results_on_validation_data_say_so(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "seq", evaluate="val")
    comparison = compare(find_runs([tmp_path]))
    for form in ("md", "html", "csv", "tex", "json"):
        assert "vim_nano, on validation data" in FORMATS[form](comparison), form


class TestNames:
    """Names that mean something in other formats."""

    HOSTILE = "a\\b{c}#$%&_d~e^f|g<h>\ni*[/]`"

    @pytest.fixture
    def comparison(self, tmp_path: Path) -> Comparison:
        for seed in (0, 10):
            fake_run(tmp_path / f"seq{seed}", "seq", seed, data=self.HOSTILE)
            fake_run(tmp_path / f"hostile{seed}", self.HOSTILE, seed, data=self.HOSTILE, shift=seed / 100)
        return compare(find_runs([tmp_path]))

    def test_latex(self, comparison: Comparison) -> None:
        (line,) = [line for line in FORMATS["tex"](comparison).splitlines() if line.startswith("a")]
        cell = line.split(" & ")[0]
        assert not re.search(r"(?<!\\)[#$%&_^~|<>]", cell), "every special character is escaped"
        words = {"backslash": "\\", "asciitilde": "~", "asciicircum": "^", "less": "<", "greater": ">", "bar": "|"}
        text = re.sub(r"\\text([a-z]+)\{\}|\\(.)", lambda m: words[m[1]] if m[1] else m[2], cell)
        assert text == self.HOSTILE.replace("\n", " ")

    def test_every_line_of_latex_is_a_row_or_a_command(self, comparison: Comparison) -> None:
        lines = filter(None, FORMATS["tex"](comparison).splitlines())
        assert all(line[0] in "%\\" or line.endswith(r"\\") for line in lines)

    def test_markdown(self, comparison: Comparison) -> None:
        lines = [line for line in FORMATS["md"](comparison).splitlines() if line.startswith("|")]
        assert len(lines) == 4
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {7}
        assert "<h>" not in "".join(lines)

    def test_csv(self, comparison: Comparison) -> None:
        rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](comparison))))
        assert [row["method"] for row in rows] == [self.HOSTILE.replace("\n", " "), "seq"]

    def test_html_is_well_formed(self, comparison: Comparison) -> None:
        body = FORMATS["html"](comparison).partition("<body>")[2].partition("</body>")[0]
        ET.fromstring(body.replace("&nbsp;", " "))

    def test_terminal(self, comparison: Comparison) -> None:
        buffer = io.StringIO()
        print_comparison(comparison, Console(file=buffer, width=300))
        assert buffer.getvalue().count("[/]") == 3  # title, row, verdict


def test_paired_test_over_seeds(tmp_path: Path) -> None:
    """Differences of 10, 12 and 14 points: mean 12, standard error 2/√3; Student's p for t = 6√3, 2 degrees: 0.0091."""
    for seed, shift in ((0, 0.0), (10, 0.02), (100, 0.04)):
        fake_run(tmp_path / f"seq{seed}", "seq", seed, shift=-0.1)
        fake_run(tmp_path / f"er{seed}", "er", seed, shift=shift)
    fake_run(tmp_path / "er1", "er", 1)  # without a partner
    rows = compare(find_runs([tmp_path])).rows
    aa, fm = paired_tests(rows, "er", "seq")
    assert aa.seeds == (0, 10, 100)
    assert (aa.mean, aa.error) == pytest.approx((12, 2 / 3**0.5))
    assert aa.t_test == pytest.approx(1 - 6 * 3**0.5 / (108 + 2) ** 0.5)
    assert aa.wilcoxon is None
    assert "paired over 3 seeds: +12.00 points, standard error 1.15" in aa.sentence()
    assert fm.t_test is None
    assert "too few" not in aa.sentence()
    two = compare([RunDirectory(tmp_path / name) for name in ("er0", "er10", "seq0", "seq10")]).rows
    assert "Two seeds are too few for a conclusion" in paired_tests(two, "er", "seq")[0].sentence()
    with pytest.raises(ConfigError, match="did you mean 'seq'"):
        paired_tests(rows, "er", "sq")
    with pytest.raises(ConfigError, match="fewer than two seeds"):
        paired_tests(compare([RunDirectory(tmp_path / name) for name in ("er0", "seq0")]).rows, "er", "seq")


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
    assert all(len(found.benchmarks[name]) == 2 for name in names)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_table_at_80_columns_shows_every_number(tmp_path: Path, encoding: str) -> None:
    """With long labels, on terminals that know "±" and on those that do not."""
    for weight in (1.0, 123456789.125):
        for seed in (0, 1):
            path = tmp_path / f"{weight}-{seed}"
            fake_run(path, "inf-ssm-exact", seed, shift=seed / 100, distance="martin+0.125*c", weight=weight)
    for seed in (0, 1):
        fake_run(tmp_path / f"head-{seed}", "inf-ssm-exact+gda", seed, shift=-seed / 5)  # wide: "± 14.1"
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_comparison(compare(find_runs([tmp_path])), Console(file=terminal, width=80))
    terminal.seek(0)
    text = terminal.read()
    assert max(map(len, text.splitlines())) <= 80
    sign = "±" if encoding == "utf-8" else "+-"
    assert text.count(f"53.8 {sign} 0.7") == 2
    assert encoding == "ascii" or any(line.split()[:2] == ["inf-ssm-exact+gda", "2"] for line in text.splitlines())
    assert "…" not in text
