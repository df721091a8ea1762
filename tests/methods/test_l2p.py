from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from infssm.errors import ConfigError
from infssm.methods.bases.l2p import PromptedModel, PromptPool, pull
from infssm.ssm import find_mixers
from tests.compare import assert_rounding, identical
from tests.methods import toys
from tests.methods.replaying import build, optimizer_of, step, train
from tests.methods.toys import TASKS


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def test_selection_and_pull_by_hand() -> None:
    torch.manual_seed(0)
    pool, query = PromptPool(5, 2, 3, select=2).double(), torch.randn(4, 3, dtype=torch.float64)
    selection = pool(query)
    total = 0.0
    for row, chosen, tokens in zip(query.tolist(), selection.indices.tolist(), selection.tokens, strict=True):
        similarity = [cosine(row, key) for key in pool.keys.tolist()]
        order = sorted(range(5), key=lambda p: -similarity[p])[:2]
        assert chosen == order
        assert identical(tokens, torch.cat([pool.prompts[p] for p in order]))
        total += sum(similarity[p] for p in order)
    assert float(pull(selection.similarity).detach()) == pytest.approx(total / 4, rel=1e-12)
    again = pool(None, selection.indices)
    assert identical(again.tokens, selection.tokens)
    assert again.similarity is None


def test_the_head_sees_the_mean_of_the_prompts_outputs() -> None:
    torch.manual_seed(0)
    backbone = toys.vim()
    frozen = copy.deepcopy(backbone)
    model = PromptedModel(backbone, size=4, length=3, select=2).double()
    x, lengths = toys.inputs("vim_nano"), []
    handle = backbone.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    logits = model(x)
    handle.remove()
    assert lengths == [5 + 2 * 3]
    toys.nudge(backbone)  # the query does not follow the backbone
    query = frozen.pool(frozen.forward_features(x))
    assert_rounding(model.query(x), query)
    toys_selection = model.prompt_pool(query)
    tokens = torch.cat((toys_selection.tokens, backbone.embed(x)), dim=1)
    expected = backbone.head(backbone.encode(tokens)[:, :6].mean(dim=1))
    torch.testing.assert_close(model(x), expected)
    assert not identical(model(x), logits)


def test_the_query_model_is_out_of_sight_but_saved_and_moved() -> None:
    torch.manual_seed(0)
    model = PromptedModel(toys.vim(), size=4, length=2, select=2)
    assert len(find_mixers(model)) == 2
    assert not any("query" in name for name, _ in model.named_parameters())
    state = model.state_dict()
    assert any(name.startswith("query.") for name in state)
    other = PromptedModel(toys.vim(seed=3), size=4, length=2, select=2)
    other.load_state_dict(state)
    x = toys.inputs("vim_nano")
    model.double(), other.double()
    assert identical(model(x), other(x))
    assert model.query(x.float().double()).dtype == torch.float64
    model.float()
    assert model.query(x.float()).dtype == torch.float32
    assert copy.deepcopy(model)._query is model._query


def test_terms_of_a_step_by_hand() -> None:
    method = build("l2p-r", pull=0.3, replay_batch=4)
    train(method, TASKS[0])
    method.begin_task(TASKS[1])
    buffer, batch, module = method.base.buffer, toys.batch(TASKS[1]), method.module
    twin = torch.Generator()
    twin.set_state(buffer.generator.get_state())
    entries = buffer.get(torch.randperm(len(buffer), generator=twin)[:4])
    x = torch.cat((batch.x, entries["image"].double() / 255))
    y = torch.cat((batch.y, entries["label"]))
    keys, query = F.normalize(module.prompt_pool.keys, dim=1), F.normalize(module.query(x), dim=1)
    similarity = (query @ keys.T).topk(2, dim=1).values.sum(1).mean()
    terms = method.loss(batch)
    torch.testing.assert_close(terms["ce"], F.cross_entropy(module(x)[:, :4], y))  # classes met so far
    torch.testing.assert_close(terms["pull"], -0.3 * similarity)


def test_the_first_task_is_not_replayed() -> None:
    method = build("l2p-r")
    method.begin_task(TASKS[0])
    optimizer, batch = optimizer_of(method), toys.batch(TASKS[0])
    step(method, batch, optimizer)
    assert len(method.base.buffer) == 4
    expected = F.cross_entropy(method.module(batch.x)[:, :2], batch.y)
    torch.testing.assert_close(method.loss(batch)["ce"], expected)


def test_the_class_token_is_frozen_and_everything_else_learns() -> None:
    method = build("l2p-r")
    method.begin_task(TASKS[0])
    before = {k: v.clone() for k, v in method.module.state_dict().items()}
    toys.total(method.loss(toys.batch(TASKS[0]))).backward()
    module = method.module
    assert module.model.cls_token.grad is None
    without = [n for n, p in module.named_parameters() if p.grad is None]
    assert without == ["model.cls_token"]
    optimizer = optimizer_of(method)
    step(method, toys.batch(TASKS[0]), optimizer)
    after = module.state_dict()
    still = {key for key in before if identical(before[key], after[key])}
    assert still == {"model.cls_token", *[key for key in before if key.startswith("query.")]}


def test_the_pull_brings_chosen_keys_nearer() -> None:
    method = build("l2p-r", pull=50.0)
    method.begin_task(TASKS[0])
    batch, module = toys.batch(TASKS[0]), method.module
    query = module.query(batch.x)

    def nearness() -> float:
        return float(pull(module.prompt_pool(query).similarity).detach())

    before, optimizer = nearness(), optimizer_of(method)
    for _ in range(5):
        step(method, batch, optimizer)
    assert nearness() > before + 0.05


def test_more_prompts_than_the_pool_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot select 5 prompts from a pool of 4"):
        build("l2p-r", pool_size=4, select=5)
    with pytest.raises(ConfigError, match="embed, encode"):
        build("l2p-r", model=torch.nn.Linear(2, 6))
