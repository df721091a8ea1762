"""What is searched, as people write it."""

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from infssm.bench.sweeps import parse_space
from infssm.bench.sweeps.space import overrides_of
from infssm.errors import ConfigError


def test_ranges_and_lists() -> None:
    fixed, space = parse_space(
        [
            "method=ewc",
            "method.weight=log:1e-2..1e6",
            "train.lr_scale=0.1..1",
            "model.options.depth=int:1..8",
            "data.recipe=light,none",
            "data.tasks=[[0, 1], [2]]",
            "data.name=../images",
        ]
    )
    assert fixed == ["method=ewc", "data.tasks=[[0, 1], [2]]", "data.name=../images"]
    assert space == {
        "method.weight": FloatDistribution(1e-2, 1e6, log=True),
        "train.lr_scale": FloatDistribution(0.1, 1.0),
        "model.options.depth": IntDistribution(1, 8),
        "data.recipe": CategoricalDistribution(("light", "none")),
    }


def test_values_are_settings_people_can_read() -> None:
    _, space = parse_space(["a.b=log:1e-2..1e6", "c=int:1..8", "d=x,y", "e=0.5..1"])
    params = {"a.b": 123456.789, "c": 3, "d": "y", "e": 0.50001}
    assert overrides_of(space, params) == ["a.b=123500", "c=3", "d=y", "e=0.5"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=log:0..1", "must begin above 0"),
        ("a=2..1", "must be below the upper"),
        ("a=int:1..2.5", "must be whole"),
        ("a=log:1e-2..many", "a range is written"),
        ("a=lag:1..2", None),
    ],
)
def test_ranges_that_are_none(text: str, message: str | None) -> None:
    if message is None:
        assert parse_space([text]) == ([text], {})
        return
    with pytest.raises(ConfigError, match=message):
        parse_space([text])


def test_a_setting_is_searched_once() -> None:
    with pytest.raises(ConfigError, match="searched twice"):
        parse_space(["a=1,2", "a=3,4"])
