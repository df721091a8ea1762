from __future__ import annotations

import warnings

import pytest

from infssm.errors import ConfigError, NoSSMLayersError
from infssm.methods import Regularizer, attach, build_method, canonical_name, list_methods, parse_name
from infssm.methods.core.build import split_name
from tests.methods import toys

OURS = {"seq", "joint", "ewc", "si", "mas", "ucl", "lwf-ac", "lwf-abc", "inf-ssm", "inf-ssm+", "inf-ssm-exact"}


def test_names_are_kept() -> None:
    assert set(list_methods()) >= OURS


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("er", ["er"]),
        ("er+inf-ssm", ["er", "inf-ssm"]),
        ("inf-ssm+", ["inf-ssm+"]),
        ("er+inf-ssm+", ["er", "inf-ssm+"]),
        ("der+++inf-ssm", ["der++", "inf-ssm"]),
        ("der+++inf-ssm++ewc", ["der++", "inf-ssm+", "ewc"]),
    ],
)
def test_plus_joins_and_belongs_to_names(name: str, parts: list[str]) -> None:
    assert split_name(name) == parts


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("inf-ssm+er", "er+inf-ssm"),
        ("er+inf-ssm", "er+inf-ssm"),
        ("mas+ewc", "ewc+mas"),
        ("ewc+seq", "ewc"),
        ("seq", "seq"),
        ("lwf-ac+inf-ssm++der++", "der+++inf-ssm++lwf-ac"),
    ],
)
def test_a_method_has_one_name(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical == canonical_name(canonical)


def test_the_order_of_a_name_does_not_matter() -> None:
    one, other = (build_method(toys.vim(), name, **{"mas.weight": 3.0}) for name in ("mas+er+ewc", "er+ewc+mas"))
    assert one.name == other.name == "er+ewc+mas"
    assert [c.name for c in one.components] == [c.name for c in other.components]
    state = one.state_dict()
    assert state.keys() == other.state_dict().keys()
    state["name"] = "mas+er+ewc"  # as states were named before names were sorted
    other.load_state_dict(state)


def test_joint_training_cannot_be_attached() -> None:
    with pytest.raises(ConfigError, match=r"data of all tasks.*infssm\.run.*method=joint"):
        attach(toys.vim(), "joint")


def test_regularizers_alone_stand_on_seq() -> None:
    base, regularizers, head = parse_name("ewc+inf-ssm-exact")
    assert head.name == "linear"
    assert base.name == "seq"
    assert [r.name for r in regularizers] == ["ewc", "inf-ssm-exact"]
    assert all(issubclass(r, Regularizer) for r in regularizers)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inf-smm", "did you mean 'inf-ssm'"),
        ("seq+joint", "only one base"),
        ("ewc+ewc", "twice"),
        ("joint+ewc", "nothing to regularize"),
        ("frozen+ewc", "the features of frozen do not move, so there is nothing to regularize"),
        ("inf-ssm+inf-ssm-exact", "hold the same states; choose one"),
        ("er+inf-ssm++inf-ssm", "inf-ssm and inf-ssm[+] hold the same states"),
        ("lwf-ac+lwf-abc", "lwf-abc and lwf-ac hold the same states"),
        ("", "unknown method ''"),
        ("+ewc", "unknown method ''"),
    ],
)
def test_impossible_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_method(toys.vim(), name)


@pytest.mark.parametrize("name", ["frozen", "joint"])
def test_a_base_without_a_reason_refuses_regularizers_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_name.cache_clear()
    monkeypatch.setattr(parse_name(name).base, "why_no_regularizers", None)
    parse_name.cache_clear()
    with pytest.raises(ConfigError, match=f"{name} leaves nothing to regularize"):
        parse_name(f"{name}+ewc")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wieght": 1.0}, "did you mean 'weight'"),
        ({"weight": -1.0}, r"ewc\.weight.*greater than or equal to 0.*got -1"),
        ({"params": "AC"}, r"ewc\.params.*'AC-direct'"),
        ({"ewc.gama": 0.5}, "did you mean 'gamma'"),
        ({"ewc": {"gama": 0.5}}, "did you mean 'gamma'"),
        ({"layers": 9}, "the model has 2 state space layers"),
        ({"b_mode": "euclid"}, r"states\.b_mode"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_method(toys.vim(), "ewc", **options)


def test_shared_options_must_say_whose() -> None:
    with pytest.raises(ConfigError, match=r"belongs to ewc and mas: write ewc\.weight"):
        build_method(toys.vim(), "ewc+mas", weight=3.0)
    method = build_method(toys.vim(), "ewc+mas", **{"ewc.weight": 3.0, "mas": {"weight": 4.0}, "states.layers": 1})
    assert [r.config.weight for r in method.regularizers] == [3.0, 4.0]
    assert all(m.key.startswith("layers.1.") for m in method.regularizers[0].parameters.members)


def test_paper_values_are_the_defaults() -> None:
    ewc, si, mas = (build_method(toys.vim(), name).regularizers[0].config for name in ("ewc", "si", "mas"))
    assert (ewc.weight, ewc.gamma, ewc.label_weight) == (200.0, 0.75, "probability")
    assert (si.weight, si.xi, si.clamp_omega) == (1e3, 0.9, True)
    assert mas.weight == 10.0
    assert build_method(toys.vim(), "inf-ssm").regularizers[0].config.weight == 1e6


def test_every_option_is_described() -> None:
    for name in list_methods():
        for component in parse_name(name).classes:
            for field, info in component.Config.model_fields.items():
                assert info.description, f"{component.name}.{field}"


@pytest.mark.parametrize("name", ["inf-ssm", "inf-ssm+"])
def test_the_simplified_distance_comes_with_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match="'inf-ssm-exact'") as caught:
        attach(toys.vim(), name)
    assert caught[0].filename == __file__
    assert "destroy" in str(caught[1].message)  # the published weight, on a model of some thousand parameters
    assert len(build_method(toys.vim(), name, weight=1e3).warnings()) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(toys.vim(), "inf-ssm-exact")
        build_method(toys.vim(), name)


def test_number_of_classes_is_the_models_unless_given() -> None:
    assert build_method(toys.vim(), "seq").context.num_classes == toys.CLASSES
    assert build_method(toys.vim(), "seq", num_classes=3).context.num_classes == 3


def test_a_model_without_state_space_layers() -> None:
    import torch

    for name in ("inf-ssm-exact", "ewc", "ucl"):
        with pytest.raises(NoSSMLayersError):
            attach(torch.nn.Linear(2, 2), name)
