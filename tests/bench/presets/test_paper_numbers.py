"""Every number of the paper's tables is in the presets, or there is a written reason why not."""

import pytest

from infssm.bench.presets import VARIANTS, list_benchmarks, list_presets, load_preset, paper_cells, paper_numbers
from infssm.learner.config.fields import RunConfig
from infssm.learner.config.load import load_config
from infssm.learner.setup import check_config
from infssm.methods import method_options

DATASETS = {"ImageNet-R": "imagenet-r", "CIFAR-100": "cifar100", "Caltech-256": "caltech256", "CUB-200-2011": "cub200"}
TRAIN = {
    "Batch Size": "batch_size",
    "Training Epochs": "epochs",
    "Base LR": "lr",
    "Warmup LR": "warmup_lr",
    "Minimum LR": "min_lr",
    "Task LR Scaling": "lr_scale",
    "Weight Decay": "weight_decay",
}
EXEMPLAR_FREE = {
    "EWC": ("ewc", {"lambda": "weight", "gamma": "gamma"}),
    "SI": ("si", {"c": "weight", "xi": "xi"}),
    "MAS": ("mas", {"lambda": "weight"}),
    "LwF (MSE)": ("lwf-abc", {"MSE-lambda": "weight", "MSE-gamma": "b_weight"}),
    "Inf-SSM": ("inf-ssm", {"lambda": "weight"}),
    "Inf-SSM+": ("inf-ssm+", {"lambda": "weight", "gamma": "gamma"}),
}
REPLAY = {
    "ER": {},
    "LUCIR": {
        "LUCIR-lambda_base": "lambda_base",
        "LUCIR-lambda_MR": "lambda_mr",
        "LUCIR-K_MR": "k_mr",
        "LUCIR-MR Margin": "margin",
    },
    "X-DER": {
        "X-DER-gamma": "gamma",
        "X-DER-Temp": "temperature",
        "X-DER-Base Temp": "base_temperature",
        "X-DER-alpha": "alpha",
        "X-DER-beta": "beta",
        "X-DER-SimCLR Batch Size": "simclr_batch_size",
        "X-DER-SimCLR Num Augs": "simclr_num_aug",
        "X-DER-lambda": "lambda_cons",
        "X-DER-dp Weight": "dp_weight",
        "X-DER-Contr Margin": "margin",
        "X-DER-Constr eta": "eta",
        "X-DER-Future Constr": "future_constraint",
        "X-DER-Part Constr": "past_constraint",
    },
    "L2P-R": {"L2P-R-Pull-Constr": "pull"},
    "CLFD": {},
}
TABLES = paper_numbers()["hyperparameters"]


def config_of(name: str, variant: str = "paper") -> RunConfig:
    return load_config(load_preset(name, variant).values)


def options_of(config: RunConfig, component: str) -> dict:
    return dict(method_options(config.method.name, config.method.options)[component])


def benchmark(entry: dict) -> str:
    return f"{DATASETS[entry['dataset']]}/{entry['n_tasks']}-task"


def entry_id(entry: dict) -> str:
    return f"{entry['table']}-{entry['dataset']}".replace(" ", "")


@pytest.mark.parametrize("entry", [e for e in TABLES if e["family"] == "EFCIL"], ids=entry_id)
def test_exemplar_free_hyperparameters(entry):
    assert set(entry["general"]) == set(TRAIN)
    assert set(entry["methods"]) == set(EXEMPLAR_FREE)
    for method in ("seq", "ucl", *(name for name, _ in EXEMPLAR_FREE.values())):
        train = config_of(f"{benchmark(entry)}/{method}").train
        assert {row: getattr(train, field) for row, field in TRAIN.items()} == entry["general"]
    for label, numbers in entry["methods"].items():
        name, fields = EXEMPLAR_FREE[label]
        options = options_of(config_of(f"{benchmark(entry)}/{name}"), name)
        assert {row: options[fields[row]] for row in numbers} == numbers


@pytest.mark.parametrize("entry", [e for e in TABLES if e["family"] == "replay"], ids=entry_id)
def test_replay_hyperparameters(entry):
    assert set(entry["methods"]) == set(REPLAY)
    for label, numbers in entry["methods"].items():
        base = label.lower()
        for method in (base, f"{base}+inf-ssm"):
            config = config_of(f"{benchmark(entry)}/{method}")
            options = options_of(config, base)
            mine = {row: getattr(config.train, field) for row, field in TRAIN.items()}
            mine |= {row: options[field] for row, field in REPLAY[label].items()} | {
                "Buffer Size": options["buffer_size"]
            }
            if method != base:
                mine["Inf-SSM-lambda"] = options_of(config, "inf-ssm")["weight"]
            assert mine == {row: value for row, value in numbers.items() if row in mine}
            assert set(numbers) - set(mine) <= {"Inf-SSM-lambda"}


def test_ac_rows_use_the_values_of_their_benchmark():
    """Table 6 has no values of its own: those of Tables 12 and 13, said to be assumed."""
    for tasks in (5, 10):
        for method in ("ewc", "si", "mas"):
            both = [f"imagenet-r/{tasks}-task/{method}{suffix}" for suffix in ("", "-ac")]
            abc, ac = (options_of(config_of(name), method) for name in both)
            assert ac == {**abc, "params": "AC-direct"}
            assert abc["params"] == "ABC-direct"
            assert "method" in load_preset(both[1]).assumed
        lwf = [options_of(config_of(f"imagenet-r/{tasks}-task/lwf-{s}"), f"lwf-{s}")["weight"] for s in ("ac", "abc")]
        assert lwf[0] == lwf[1]


def test_the_released_scripts_are_the_authors_code_variant():
    scripts = paper_numbers()["released_scripts"]
    for script in scripts["benchmarks"]:
        config = config_of(f"{benchmark(script)}/inf-ssm", "authors-code")
        train = config.train
        mine = {f: getattr(train, f) for f in ("lr", "warmup_lr", "min_lr")} | {"task_lr_scaling": train.lr_scale}
        mine["reg_lambda"] = options_of(config, "inf-ssm")["weight"]
        assert mine == {key: script[key] for key in mine}
        assert (train.batch_size, train.epochs, train.weight_decay, train.warmup_epochs) == (128, 40, 0.1, 5)
        assert (train.schedule, train.lr_scale_variant) == ("authors", "authors")
        assert not options_of(config, "states")["include_dt_bias"]


def test_every_published_row_is_some_presets():
    """Table 2 is Table 11 without UCL, number by number; every other row names the preset that fills it."""
    results = paper_numbers()["results"]
    eleven = {(r["dataset"], r["n_tasks"], r["method"]): r for r in results if r["table"] == "Table 11"}
    second = [r for r in results if r["table"] == "Table 2"]
    for row in second:
        other = eleven[row["dataset"], row["n_tasks"], row["method"]]
        assert {m: row[m] for m in ("AA", "AIA", "FM")} == {m: other[m] for m in ("AA", "AIA", "FM")}
    assert {key[2] for key in eleven} - {r["method"] for r in second} == {"UCL"}
    cells = paper_cells()
    assert len(cells) == len(results) - len(second)
    for cell in cells:
        preset = load_preset(cell.preset)
        assert (cell.dataset, cell.tasks) == (preset.paper["dataset"], preset.paper["n_tasks"])
        assert (
            preset.values["data"] | {"num_tasks": cell.tasks, "name": DATASETS[cell.dataset]} == preset.values["data"]
        )


def test_rows_without_a_preset_of_their_own_are_the_known_ones():
    """Inf-SSM is one run in Tables 6, 9 and 11; Table 6's Seq is Table 11's set-up with another number."""
    borrowed = [c for c in paper_cells() if load_preset(c.preset).paper["table"] != c.table]
    assert {(c.table, c.method) for c in borrowed} == {
        ("Table 6", "Seq"),
        ("Table 6", "Inf-SSM"),
        ("Table 9", "Inf-SSM"),
    }
    for cell in borrowed:
        published = load_preset(cell.preset).paper
        same = all(cell.paper[m] == published[m] for m in ("AA", "AIA", "FM"))
        assert same == (cell.method != "Seq")


def test_block_rows_regularize_the_blocks_they_name():
    layers = {"Final Block": 1, "Final 12 Blocks": 12, "All 24 Blocks": 24}
    rows = [cell for cell in paper_cells() if cell.table == "Table 7"]
    assert len(rows) == 6
    for cell in rows:
        assert options_of(config_of(cell.preset), "states")["layers"] == layers[cell.method]


def test_presets_cover_every_benchmark_of_the_paper():
    of_the_paper = {name for name in list_benchmarks() if load_preset(f"{name}/seq").sources}
    assert set(list_benchmarks()) - of_the_paper == {
        *(
            "digits/5-task",
            "cifar100/b50-5",
            "cifar100/b50-10",
            "cifar100/fscil",
            "cifar100/cold-5",
            "cifar100/cold-10",
            "tiny-imagenet/cold-10",
            "cub200/fscil",
            "waves/shapes",
            "digits/online",
        ),
        *("speech-digits/classes", "speech-digits/speakers", "stdlib-text/domains"),
    }
    assert of_the_paper == {
        *(f"{name}/{tasks}-task" for name in ("imagenet-r", "cifar100", "caltech256") for tasks in (5, 10)),
        "imagenet-r/5-task-tiny",
        "imagenet-r/10-task-tiny",
        "cub200/10-task",
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bench", list_benchmarks())
def test_every_preset_is_a_valid_configuration(bench, variant):
    mine = [name for name in list_presets() if name.rpartition("/")[0] == bench]
    assert mine
    for name in mine:
        config = config_of(name, variant)
        check_config(config)
        assert config.benchmark == bench


def test_what_the_paper_leaves_open_is_marked():
    """Reasons are kept for the values the paper's list of omissions concerns."""
    assert "method" in load_preset("cifar100/5-task/ucl").assumed
    assert "train" in load_preset("imagenet-r/5-task-tiny/inf-ssm").assumed
    assert "train" in load_preset("cub200/10-task/inf-ssm-all-24").assumed
    for name in (name for name in list_presets() if load_preset(name).sources):
        reasons = load_preset(name).assumed
        assert {"model.weights", "train.warmup_epochs"} <= set(reasons)
        assert all(isinstance(reason, str) and reason for reason in reasons.values())
