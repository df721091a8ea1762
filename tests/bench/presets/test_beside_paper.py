"""Measured results beside the paper's: which runs fill which cells, and how the tables say so."""

import pytest

from infssm.bench.presets import PAPER_FORMATS, compare_with_paper, coverage, load_preset, paper_cells
from infssm.learner.config.load import load_config, to_yaml
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.store.directory import RunDirectory


def make_run(path, preset, seed=0, variant="paper", overrides=(), accuracy=0.5):
    """A complete run of a preset whose accuracy is the same everywhere."""
    config = load_config(load_preset(preset, variant).values, [f"seed={seed}", *overrides])
    run = RunDirectory.create(path)
    run.write_text("config.yaml", to_yaml(config))
    matrix = AccuracyMatrix(config.data.num_tasks)
    for task in range(config.data.num_tasks):
        matrix.update([accuracy] * (task + 1), [1.0] * (task + 1), samples=[10] * (task + 1))
    run.write_text("accuracy_matrix.csv", matrix.to_csv())
    run.write_json("result.json", {})
    return run


def filled(cells):
    return {(cell.table, cell.preset): cell for cell in cells if cell.measured}


def test_without_runs_every_cell_is_missing_and_says_how_to_fill_it():
    cells = compare_with_paper([])
    assert [c.measured for c in cells] == [None] * len(paper_cells())
    text = PAPER_FORMATS["md"](cells)
    assert text.count("| missing |") == 3 * len(cells)
    for cell in cells:
        assert f"infssm run -p {cell.preset} --seed 0 10 100\n" in text
    assert coverage(cells) == f"0 of {len(cells)} published rows measured; {len(cells)} missing."


def test_runs_of_a_preset_fill_its_cells(tmp_path):
    name = "imagenet-r/5-task/inf-ssm"
    runs = [make_run(tmp_path / str(s), name, seed=s, accuracy=a) for s, a in ((0, 0.5), (10, 0.52))]
    cells = filled(compare_with_paper(runs))
    assert {table for table, _ in cells} == {"Table 11", "Table 6", "Table 9"}
    cell = cells["Table 11", name]
    assert cell.measured.seeds == (0, 10)
    assert cell.measured.differences == ()
    assert cell.measured.metrics["aa"].mean == pytest.approx(0.51)
    row = next(line for line in PAPER_FORMATS["md"](list(cells.values())).splitlines() if "| 49.34 ± 3.36 |" in line)
    assert "| 51.00 ± 1.41 (+1.66) |" in row


def test_a_seed_is_counted_once(tmp_path):
    """Runs with the same seed that differ only in the number of threads."""
    name = "imagenet-r/5-task/inf-ssm"
    runs = [make_run(tmp_path / str(t), name, overrides=[f"train.threads={t}"]) for t in (1, 2)]
    assert filled(compare_with_paper(runs))["Table 11", name].measured.seeds == (0,)


def test_either_variant_counts_as_the_preset(tmp_path):
    run = make_run(tmp_path / "run", "cifar100/10-task/inf-ssm", variant="authors-code")
    assert filled(compare_with_paper([run]))["Table 11", "cifar100/10-task/inf-ssm"].measured.differences == ()


def test_method_options_tell_rows_apart(tmp_path):
    run = make_run(tmp_path / "run", "imagenet-r/10-task/ewc-ac")
    assert {key[1] for key in filled(compare_with_paper([run]))} == {"imagenet-r/10-task/ewc-ac"}
    last = make_run(tmp_path / "last", "imagenet-r/10-task/inf-ssm-last-1")
    assert {key[1] for key in filled(compare_with_paper([last]))} == {"imagenet-r/10-task/inf-ssm-last-1"}
    other = make_run(tmp_path / "other", "imagenet-r/10-task/ewc", overrides=["method.weight=1"])
    assert not filled(compare_with_paper([other]))


def test_changed_settings_are_marked_and_faithful_runs_preferred(tmp_path):
    name = "cifar100/5-task/er"
    short = make_run(tmp_path / "short", name, overrides=["train.epochs=1"], accuracy=0.1)
    cells = compare_with_paper([short])
    assert filled(cells)["Table 1", name].measured.differences == ("train.epochs: 40 != 1",)
    text = PAPER_FORMATS["md"](cells)
    assert r"10.00\*" in text
    assert f"* {name}: train.epochs: 40 != 1." in text
    faithful = make_run(tmp_path / "full", name, overrides=["data.root=/elsewhere", "train.num_workers=2"])
    measured = filled(compare_with_paper([short, faithful]))["Table 1", name].measured
    assert measured.differences == ()
    assert measured.metrics["aa"].mean == 0.5


def test_a_start_from_random_weights_is_a_difference_and_another_path_is_none(tmp_path):
    name = "cifar100/5-task/seq"
    elsewhere = make_run(tmp_path / "path", name, overrides=["model.weights=/elsewhere/vim.pth"])
    assert filled(compare_with_paper([elsewhere]))["Table 11", name].measured.differences == ()
    random = make_run(tmp_path / "random", name, overrides=["model.weights=null"])
    differing = filled(compare_with_paper([random]))["Table 11", name].measured.differences
    assert len(differing) == 1
    assert differing[0].startswith("model.weights: ")


def test_runs_of_other_benchmarks_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", "cifar100/5-task/seq", overrides=["benchmark=mine"])
    assert not filled(compare_with_paper([run]))


@pytest.mark.parametrize("form", PAPER_FORMATS)
def test_every_format_has_every_table_and_row(form, tmp_path):
    cells = compare_with_paper([make_run(tmp_path / "run", "cub200/10-task/inf-ssm-all-24")])
    text = PAPER_FORMATS[form](cells)
    for table in ("Table 1:", "Tables 2 and 11:", "Table 6:", "Table 7:", "Table 9:", "Table 10:"):
        assert table in text
    assert text.count("missing") >= 3 * (len(cells) - 1)
    assert text.count("infssm run -p") >= len({c.preset for c in cells}) - 1
