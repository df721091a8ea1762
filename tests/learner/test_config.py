from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from infssm.bench.presets import list_presets, load_preset
from infssm.bench.running import run_path
from infssm.errors import ConfigError
from infssm.learner.config.fields import DataConfig, LogConfig, MethodConfig, ModelConfig, RunConfig, TrainConfig
from infssm.learner.config.load import config_hash, load_config, merge, parse_overrides, to_dict, to_yaml
from infssm.learner.config.resolve import resolve
from infssm.learner.optim import task_lr
from infssm.methods import parse_name

SPELLINGS = ("er+inf-ssm", "inf-ssm+er")


def test_every_field_says_what_it_is() -> None:
    for section in (DataConfig, ModelConfig, MethodConfig, TrainConfig, LogConfig):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_overrides_reach_their_fields() -> None:
    config = load_config(None, ["train.epochs=10", "method=inf-ssm", "method.weight=2e5", "model.options.depth=3"])
    assert config.train.epochs == 10
    assert config.method.name == "inf-ssm"
    assert config.method.options == {"weight": 2e5}
    assert config.model.options == {"depth": 3}


@pytest.mark.parametrize("text", ["2e5", "1E-3", "-4.5e+2", ".5e1"])
def test_exponents_are_numbers_in_yaml_too(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"method: {{name: inf-ssm, weight: {text}}}\n")
    assert load_config(path).method.options["weight"] == float(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "unknown setting train.epoch; did you mean 'epochs'?"),
        ("trian.epochs=3", "unknown setting trian; did you mean 'train'?"),
        ("train.epochs=many", "train.epochs"),
        ("train.epochs=0", "greater than or equal to 1"),
        ("train.schedule=cosine", "'authors' or 'plain'"),
        ("train.epochs", "overrides look like train.epochs=10"),
        ("train.epochs=[1", "cannot read the value"),
    ],
)
def test_bad_overrides_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("train: [1", "is not YAML"), ("- 1", "must hold a mapping"), ("seeds: 1", "did you mean 'seed'")],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(tmp_path / "none.yaml")


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError):
        RunConfig().train.epochs = 3  # type: ignore[misc]


@given(
    epochs=st.integers(1, 99),
    lr=st.floats(1e-9, 1.0),
    method=st.sampled_from(["seq", "ewc", "er+inf-ssm"]),
    seed=st.integers(0, 2**31),
)
def test_yaml_round_trip(epochs: int, lr: float, method: str, seed: int) -> None:
    values = {"train": {"epochs": epochs, "lr": lr}, "method": {"name": method, "weight": lr}, "seed": seed}
    config = load_config(values)
    again = load_config(yaml.safe_load(to_yaml(config)))
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_hash_follows_results_only() -> None:
    base = config_hash(RunConfig())
    for same in ("seed=10", "out=elsewhere", "data.root=/data", "train.num_workers=4", "log.tensorboard=true"):
        assert config_hash(load_config(None, [same])) == base, same
    for other in ("train.lr=0.1", "method=seq", "data.num_tasks=2", "train.precision=bf16-mixed"):
        assert config_hash(load_config(None, [other])) != base, other


def test_hash_follows_the_start_weights_not_their_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    (tmp_path / "b").write_bytes(b"weights")
    (tmp_path / "c").write_bytes(b"others")
    a, b, c = (config_hash(load_config(None, [f"train.task0={tmp_path / n}"])) for n in "abc")
    assert a == b != c


def test_another_name_drops_what_belonged_to_the_old_one() -> None:
    base = {"method": {"name": "ewc", "weight": 3}, "train": {"epochs": 2, "lr": 0.1}}
    assert merge(base, {"method": "mas"})["method"] == {"name": "mas"}
    assert merge(base, {"method": {"gamma": 1}})["method"] == {"name": "ewc", "weight": 3, "gamma": 1}
    model = {"model": {"name": "vim_small_patch16_224", "weights": "w.pth"}}
    assert merge(model, {"model": "vim_nano"})["model"] == {"name": "vim_nano"}
    assert merge(base, {"train": {"lr": 1}})["train"] == {"epochs": 2, "lr": 1}
    assert base["method"] == {"name": "ewc", "weight": 3}


def test_parse_overrides_nests() -> None:
    assert parse_overrides(["a.b=1", "a.c=[x, y]", "d=null"]) == {"a": {"b": 1, "c": ["x", "y"]}, "d": None}


def test_sections_may_be_names() -> None:
    config = load_config({"data": "cifar100", "model": "vim_nano", "method": "ewc"})
    assert (config.data.name, config.model.name, config.method.name) == ("cifar100", "vim_nano", "ewc")
    assert to_dict(config)["data"]["name"] == "cifar100"
    assert config.benchmark_name == "cifar100-5"


def test_one_method_has_one_directory_and_one_hash() -> None:
    one, other = (load_config({"method": {"name": name, "inf-ssm": {"weight": 2.0}}}) for name in SPELLINGS)
    assert one == other
    assert config_hash(one) == config_hash(other)
    assert run_path(one) == run_path(other)


def test_another_spelling_keeps_a_methods_options() -> None:
    base = {"method": {"name": SPELLINGS[0], "buffer_size": 7}}
    assert load_config(base, [f"method={SPELLINGS[1]}"]).method.options == {"buffer_size": 7}
    assert load_config(base, ["method=er"]).method.options == {}


def test_unknown_methods_are_left_for_the_check() -> None:
    assert load_config({"method": "inf-smm+er"}).method.name == "inf-smm+er"


@pytest.mark.parametrize(
    ("method", "asked", "scale", "variant"),
    [
        ("seq", None, 1.0, "plain"),
        ("inf-ssm-exact", None, 1.0, "plain"),
        ("frozen+gda", None, 1.0, "plain"),
        ("joint+lda", None, 1.0, "plain"),
        ("inf-ssm-exact+lda", None, 0.03, "once"),
        ("er+gda", None, 0.03, "once"),
        ("lwf-f+gda", 1.0, 1.0, "plain"),
        ("lwf-f+gda", 0.5, 0.5, "plain"),
    ],
)
def test_features_that_a_fitted_head_follows_move_slowly(
    method: str, asked: float | None, scale: float, variant: str
) -> None:
    """Decided before the hash: a method without a given factor is the run with the factor it gets."""
    config = load_config({"method": {"name": method}, "train": {"lr": 1.0, "lr_scale": asked}})
    train = resolve(config).train
    assert (train.lr_scale, train.lr_scale_variant) == (scale, variant)
    assert [task_lr(train, task) for task in (0, 1, 2)] == pytest.approx(
        [1.0, scale, scale if variant == "once" else scale**2]
    )
    named = {"method": {"name": method}, "train": {"lr": 1.0, "lr_scale": scale, "lr_scale_variant": variant}}
    assert resolve(load_config(named)) == resolve(config)


def test_presets_keep_the_rates_they_were_measured_with() -> None:
    for name in list_presets():
        values = load_preset(name).values
        composition = parse_name(values["method"]["name"])
        if composition.head.fitted and not composition.base.freezes:
            assert "lr_scale" in values["train"], name
