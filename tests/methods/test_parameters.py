from __future__ import annotations

import pytest
import torch

from infssm.errors import ConfigError
from infssm.methods.regularizers.quadratic import ParameterSet
from tests.compare import identical
from tests.methods import toys

RANK, N = 1, 4


def test_members_are_the_rows_of_the_set() -> None:
    model = toys.vim()
    members = {m.key: m for m in ParameterSet(model, "AC-direct").members}
    x_proj = model.layers[0].mixer.x_proj.weight
    assert {k for k in members if k.startswith("layers.0.mixer.x_proj.")} == {
        "layers.0.mixer.x_proj.weight[0:1]",
        "layers.0.mixer.x_proj.weight[5:9]",
    }
    delta, c = members["layers.0.mixer.x_proj.weight[0:1]"], members["layers.0.mixer.x_proj.weight[5:9]"]
    assert identical(delta.take(x_proj), x_proj[:RANK])
    assert identical(c.take(x_proj), x_proj[RANK + N :])
    assert c.take(x_proj).data_ptr() == x_proj[RANK + N].data_ptr()


def test_layers_limit_the_set() -> None:
    model = toys.vim()
    every, last = ParameterSet(model, "ABC-direct"), ParameterSet(model, "ABC-direct", layers=1)
    assert {m.key for m in last.members} == {m.key for m in every.members if m.key.startswith("layers.1.")}


def test_gradients_are_masked_and_zero_where_unused() -> None:
    model = toys.vim()
    chosen = ParameterSet(model, "AC-direct")
    weight = model.layers[0].mixer.x_proj.weight
    gradients = chosen.gradients((weight * torch.arange(9.0)[:, None]).sum())
    assert identical(gradients["layers.0.mixer.x_proj.weight[0:1]"], torch.zeros(1, 32).double())
    assert identical(gradients["layers.0.mixer.x_proj.weight[5:9]"], torch.arange(5.0, 9.0).double().repeat(32, 1).T)
    assert not gradients["layers.1.mixer.A_log"].any()


def test_importances_of_half_precision_models_are_float32() -> None:
    chosen = ParameterSet(toys.vim(dtype=torch.bfloat16), "AC-direct")
    assert {v.dtype for v in chosen.zeros().values()} == {torch.float32}


def test_frozen_parameters_are_left_out() -> None:
    model = toys.vim()
    model.layers[0].requires_grad_(False)
    assert all(m.key.startswith("layers.1.") for m in ParameterSet(model, "ABC-full").members)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="all are frozen"):
        ParameterSet(model, "ABC-full")


def test_importances_of_another_set_are_refused() -> None:
    model = toys.vim()
    with pytest.raises(ConfigError, match="another model or another set"):
        ParameterSet(model, "ABC-full").to_device(ParameterSet(model, "AC-direct").clone())
