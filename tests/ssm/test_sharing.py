"""Copies that share what does not train: as good as whole copies, whatever becomes of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from infssm.errors import ConfigError
from infssm.ssm import OldModel
from tests.compare import assert_rounding, identical
from tests.methods import toys
from tests.methods.toys import TASKS

X = toys.batch(TASKS[0]).x


def partly_frozen() -> nn.Module:
    """A vision model of which the projections of the second mixer train."""
    model = toys.vim()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mixer.x_proj" in name)
    return model


def whole_copy(model: nn.Module) -> OldModel:
    """An old model that shares nothing."""
    return OldModel(copy.deepcopy(model).requires_grad_(True))


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)


def assert_same(old: OldModel, reference: OldModel) -> None:
    one, other = (o.observe(X, features=True, logits=True) for o in (old, reference))
    assert one.logits is not None
    assert other.logits is not None
    assert_rounding(one.logits, other.logits)
    for mine, wanted in zip(one.states, other.states, strict=True):
        assert_rounding(mine.a, wanted.a)
        assert_rounding(mine.c, wanted.c)


def own_bytes(model: nn.Module, old: OldModel) -> int:
    mine = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    tensors = {t.untyped_storage().data_ptr(): t for t in (*old.module.parameters(), *old.module.buffers())}
    return sum(t.untyped_storage().nbytes() for pointer, t in tensors.items() if pointer not in mine)


def test_a_copy_of_what_trains_alone() -> None:
    model = partly_frozen()
    old, reference = OldModel(model), whole_copy(model)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert 0 < trained <= own_bytes(model, old) <= trained + buffers
    train(model)
    assert_same(old, reference)
    assert not any(p.requires_grad for p in old.module.parameters())
    assert sum(p.requires_grad for p in model.parameters()) > 0


def test_unfreezing_later() -> None:
    model = partly_frozen()
    old, reference = OldModel(model), whole_copy(model)
    for unfrozen in ("layers.0", "head", "layers.1.mixer.A_log"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(unfrozen))
        old.states(X)
        train(model)
        assert_same(old, reference)


def test_tied_weights_are_parted_together() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.requires_grad_(False)
    old = OldModel(model)
    model.requires_grad_(True)
    old.follow()
    assert old.module[0].weight is old.module[1].weight
    assert old.module[0].weight is not model[0].weight


def test_training_behind_its_back_is_found() -> None:
    model = partly_frozen()
    old = OldModel(model)
    model.requires_grad_(True)
    train(model)
    with pytest.raises(ConfigError, match="was frozen when the last task ended"):
        old.states(X)
    assert old.is_stale()


def test_writing_the_same_values_is_no_change() -> None:
    model = partly_frozen()
    old, reference = OldModel(model), whole_copy(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not old.is_stale()
    assert_same(old, reference)


def test_changes_that_autograd_does_not_see_are_found() -> None:
    model = partly_frozen()
    old = OldModel(model)
    assert not old.is_stale()
    model.layers[0].mixer.in_proj.weight.data[0, 0] += 1e-9  # as adapters are merged
    assert old.is_stale()


def test_buffers_are_its_own_but_for_packed_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    model.register_buffer("packed", torch.ones(4, 2, dtype=torch.int32))
    old = OldModel(model)
    before = old.module(torch.ones(1, 3))
    model.train()(torch.randn(8, 3))
    assert not torch.equal(model[1].running_mean, torch.zeros(4))
    assert identical(old.module(torch.ones(1, 3)), before)
    assert old.module.packed is model.packed
    assert old.module[0].weight is model[0].weight


@pytest.mark.parametrize("from_whole", [False, True])
@pytest.mark.parametrize("to_whole", [False, True])
def test_its_state_holds_its_own(from_whole: bool, to_whole: bool) -> None:
    model = partly_frozen()
    old = (whole_copy if from_whole else OldModel)(model)
    state = {key: value.clone() for key, value in old.state_dict().items()}
    assert (len(state) == len(model.state_dict())) is from_whole
    train(model)
    other = (whole_copy if to_whole else OldModel)(model)
    other.load_state_dict(state)
    assert_same(other, old)
    train(model)
    assert_same(other, old)
    with pytest.raises(ConfigError, match="old model of another model"):
        other.load_state_dict({"nobody.weight": torch.zeros(1)})


def test_moving_it_leaves_the_new_model_alone() -> None:
    model = partly_frozen()
    OldModel(model).to("meta")
    assert all(p.device.type == "cpu" for p in model.parameters())
