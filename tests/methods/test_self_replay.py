"""`self-replay`: what the old model generates, and what is held on it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infssm import _processes
from infssm._processes import Share
from infssm.errors import ConfigError
from infssm.methods import Batch, Method, attach, build_method
from infssm.methods.core.build import split_name
from infssm.methods.regularizers import self_replay
from infssm.methods.regularizers.self_replay import SelfReplay
from infssm.models import create_model
from infssm.ssm import OldModel
from tests.compare import identical
from tests.methods import toys
from tests.methods.test_distillation import kl_by_hand
from tests.ssm import hf

VOCABULARY = 12
SMALL = {"self-replay": {"sequences": 10, "replay_batch": 4, "length": 6, "cache": 0}}
"""With the old model in every step, whose logits have the precision of the references."""


def language_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = create_model("mamba_lm_nano", d_model=16, n_layer=2, d_state=4, vocab_size=VOCABULARY).to(dtype)
    toys.nudge(model, 0.05)
    return model


def batch(seed: int = 0) -> Batch:
    tokens = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1], tokens[:, 1:])


def start(name: str, **options: Any) -> Method:
    return build_method(language_model(), name, data_kind="language", **SMALL, **options)


def second_task(name: str, **options: Any) -> Method:
    """A method in its second task, with a model that has moved."""
    method = start(name, **options)
    method.begin_task(0)
    method.end_task(0)
    method.begin_task(1)
    toys.nudge(method.module, 0.05, seed=3)
    return method


def component(method: Method) -> SelfReplay:
    return next(r for r in method.regularizers if isinstance(r, SelfReplay))


def drawn(method: Method) -> Tensor:
    """The sequences of the next step, without taking them."""
    twin = torch.Generator()
    twin.set_state(component(method).generator.get_state())
    sequences = component(method).sequences
    assert sequences is not None
    return sequences[torch.randperm(len(sequences), generator=twin)[:4]].long()


def divergence(old: nn.Module, new: nn.Module, tokens: Tensor, temperature: float) -> float:
    rows = zip(old(tokens).flatten(0, 1).tolist(), new(tokens).flatten(0, 1).tolist(), strict=True)
    each = [kl_by_hand(a, b, temperature) for a, b in rows]
    return sum(each) / len(each)


def test_the_term_is_the_divergence_on_what_the_old_model_generated() -> None:
    method = second_task("self-replay", weight=1.5)
    assert method.context.old is not None
    old, tokens = copy.deepcopy(method.context.old.module), drawn(method)
    terms = method.loss(batch())
    expected = 1.5 * divergence(old, method.module, tokens, 1.0)
    assert expected > 0
    assert terms["self-replay/logits"].item() == pytest.approx(expected, rel=1e-10)
    alone = build_method(copy.deepcopy(method.module), "seq", data_kind="language")
    alone.begin_task(1)
    assert terms["ce"].item() == pytest.approx(alone.loss(batch())["ce"].item(), rel=1e-12)


@pytest.mark.parametrize(("index", "times"), [(1, 1.0), (2, 1.5), (4, 2.5)])
def test_a_growing_weight_is_proportional_to_the_number_of_tasks(index: int, times: float) -> None:
    found = []
    for growing in (False, True):
        method = start("self-replay", **{"self-replay.growing": growing})
        for task in range(index):
            method.begin_task(task)
            method.end_task(task)
        method.begin_task(index)
        toys.nudge(method.module, 0.05, seed=3)
        found.append(float(method.loss(batch())["self-replay/logits"].detach()))
    assert found[0] > 0
    assert found[1] == pytest.approx(times * found[0], rel=1e-9)


def test_the_old_model_generates_and_what_it_made_is_gone_when_the_task_ends() -> None:
    method = second_task("self-replay")
    sequences = component(method).sequences
    assert sequences is not None
    assert sequences.shape == (10, 6)
    assert len({tuple(row) for row in sequences.tolist()}) > 5
    certain = start("self-replay")
    with torch.no_grad():  # a model that always says 7
        certain.module.lm_head.weight.zero_()
        certain.module.lm_head.bias = nn.Parameter(100.0 * (torch.arange(VOCABULARY) == 7).double())
    certain.begin_task(1)
    found = component(certain).sequences
    assert found is not None
    assert (found[:, 1:] == 7).all()
    method.end_task(1)
    assert component(method).sequences is None
    assert method.state_dict()["components"]["self-replay"]["sequences"] is None


@pytest.mark.parametrize("name", ["self-replay", "self-replay+lwf"])
def test_logits_computed_once_give_the_terms_and_gradients_of_an_old_model_in_every_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    original = OldModel.observe
    monkeypatch.setattr(OldModel, "observe", lambda self, x, **kw: calls.append(x) or original(self, x, **kw))
    found = []
    for cache in (0, 1):
        method = second_task(name, **{"self-replay.cache": cache})
        toys.nudge(method.module, 0.2, seed=4)  # away from the minimum, where the divergence has no gradient
        calls.clear()
        terms = [method.loss(batch(seed)) for seed in range(3)]
        assert len(calls) == 3  # of 4 sequences each: 3 draws, or the 10 sequences once
        sum(toys.total(each) for each in terms).backward()  # type: ignore[union-attr]
        gradients = torch.cat([parameter.grad.flatten() for parameter in method.module.parameters()])
        found.append((torch.stack([each["self-replay/logits"].detach() for each in terms]), gradients))
        method.loss(batch())
        assert len(calls) == (4 if cache == 0 else 3)
    (value, gradient), (kept_value, kept_gradient) = found
    # Half precision: 11 bits of a logit.
    torch.testing.assert_close(kept_value, value, rtol=5e-3, atol=1e-6)
    assert (kept_gradient - gradient).norm() < 5e-3 * gradient.norm()
    assert component(method).logits is not None
    method.end_task(1)
    assert component(method).logits is None


@pytest.mark.parametrize("name", ["self-replay", "self-replay+lwf-f", "self-replay+lwf-ac"])
def test_one_forward_on_new_and_generated_sequences_gives_the_gradients_of_two(name: str) -> None:
    lengths, found = [], []
    for together in (False, True):
        method = second_task(name, **{"self-replay.length": 7})  # as long as the new data's sequences
        if not together:
            method.context.forward = method.module.forward  # type: ignore[assignment]
        rows: list[int] = []
        method.module.register_forward_hook(lambda *call, rows=rows: rows.append(len(call[2])))  # type: ignore[misc]
        terms = method.loss(batch())
        toys.total(terms).backward()
        lengths.append(rows)
        found.append([*terms.values(), *(parameter.grad for parameter in method.module.parameters())])
    assert lengths[0][-1] == 4
    assert lengths[1] == [8]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_a_step_that_failed_leaves_nothing_to_the_next_one() -> None:
    method = second_task("self-replay", length=7)
    method.context.forward(batch().x)  # and then, say, memory runs out before the penalty
    toys.nudge(method.module, 0.05, seed=4)
    rows: list[int] = []
    method.module.register_forward_hook(lambda *call: rows.append(len(call[2])))
    terms = method.loss(batch(1))
    assert rows == [8]
    toys.total(terms).backward()


def test_keyword_arguments_of_a_batch_are_not_given_to_generated_sequences() -> None:
    method = second_task("self-replay", length=7)
    calls: list[tuple[int, set[str]]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        calls.append((len(found), set(kwargs)))

    method.module.register_forward_hook(note, with_kwargs=True)
    method.context.begin_step(3)
    own = method.context.forward(batch().x[:3], mask=torch.ones(3, 7, dtype=torch.bool))
    assert own.shape == (3, 7, VOCABULARY)
    pair = method.context.compare()
    assert pair.new.logits is not None
    assert pair.new.logits.shape == (4, 7, VOCABULARY)
    assert calls == [(3, {"mask"}), (4, set())]


def test_logits_are_not_kept_where_they_do_not_fit_or_do_not_serve() -> None:
    method = second_task("self-replay+lwf-ac", **{"self-replay.cache": 1})
    method.loss(batch())
    assert component(method).logits is None
    method = second_task("self-replay", cache=1)
    method.loss(batch())
    assert component(method).logits is not None
    large = second_task("self-replay", cache=1, sequences=2**13, length=8)  # 2 bytes for each of 12 tokens: 1.5 MiB
    large.loss(batch())
    assert component(large).logits is None


def test_prefixes_begin_equal_shares_of_the_sequences() -> None:
    sequences = component(second_task("self-replay", prefixes=[[3], [1, 2], [5, 5, 5]])).sequences
    assert sequences is not None
    assert sequences.shape == (10, 6)
    assert [row[0] for row in sequences.tolist()] == [3] * 4 + [1] * 3 + [5] * 3
    assert (sequences[4:7, 1] == 2).all()
    assert (sequences[7:, :3] == 5).all()


def test_other_regularizers_act_on_the_same_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    method = second_task(
        "self-replay+lwf+lwf-ac+inf-ssm-exact", **{"inf-ssm-exact.weight": 1.0, "lwf.temperature": 3.0}
    )
    calls: list[Any] = []
    original = OldModel.observe
    monkeypatch.setattr(OldModel, "observe", lambda self, x, **kw: calls.append(x) or original(self, x, **kw))
    assert method.context.old is not None
    old, tokens = copy.deepcopy(method.context.old.module), drawn(method)
    terms = method.loss(batch())
    assert len(calls) == 1
    assert torch.equal(calls[0], tokens)
    assert {key.split("/")[0] for key in terms} == {"ce", "self-replay", "lwf", "lwf-ac", "inf-ssm-exact"}
    assert all(value.item() > 0 for value in terms.values())
    assert terms["lwf/logits"].item() == pytest.approx(divergence(old, method.module, tokens, 3.0), rel=1e-10)
    assert "self-replay/logits" not in second_task("self-replay+lwf", **{"self-replay.weight": 0}).loss(batch())


@pytest.mark.parametrize("base", ["seq", "er"])
@pytest.mark.parametrize("group", ["lwf+lwf-f+lwf-ac+si", "lwf-abc", "inf-ssm", "inf-ssm+", "inf-ssm-exact"])
def test_it_goes_with_every_base_and_regularizer_of_language(base: str, group: str) -> None:
    method = start(f"{base}+self-replay+{group}", **({"measure_at": 1} if group == "inf-ssm-exact" else {}))
    for task in range(2):
        method.begin_task(task, [batch()])
        for seed in range(2):
            terms = method.loss(batch(seed))
            toys.total(terms).backward()
            method.after_step()
        method.end_task(task, [batch()])
    assert all(torch.isfinite(value) for value in terms.values())
    assert {key.split("/")[0] for key in terms if "/" in key} == {"self-replay", *split_name(group)}


def steps(method: Method, optimizer: torch.optim.Optimizer, seeds: range) -> list[Tensor]:
    found = []
    for seed in seeds:
        terms = method.loss(batch(seed))
        toys.total(terms).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step()
        found.append(terms["self-replay/logits"].detach())
    return found


@pytest.mark.parametrize("cache", [0, 1])
def test_a_saved_state_gives_the_identical_next_steps(cache: int) -> None:
    method = second_task("self-replay", refresh=2, cache=cache)
    optimizer = torch.optim.SGD(method.module.parameters(), lr=0.1)
    steps(method, optimizer, range(1))
    file = io.BytesIO()
    torch.save({"module": method.module.state_dict(), "method": method.state_dict()}, file)
    before = component(method).sequences
    expected = steps(method, optimizer, range(1, 5))
    assert not torch.equal(component(method).sequences, before)  # generated anew on the way
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = start("self-replay", refresh=2, cache=cache)
    resumed.load_state_dict(saved["method"])
    resumed.module.load_state_dict(saved["module"])
    resumed.begin_task(1)  # as a run does that continues inside a task
    found = steps(resumed, torch.optim.SGD(resumed.module.parameters(), lr=0.1), range(1, 5))
    assert all(identical(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("length", [6, 7], ids=["two forwards", "one forward"])
def test_two_processes_end_where_one_does(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods in turn, each of which takes itself for one process of two, with averaged gradients."""
    found = []
    for world in (1, 2):
        methods = [second_task("self-replay+lwf-ac", **{"self-replay.length": length}) for _ in range(world)]
        optimizers = [torch.optim.SGD(method.module.parameters(), lr=0.1) for method in methods]
        for seed in range(3):
            whole = batch(seed)
            for rank, method in enumerate(methods):
                for module in (self_replay, _processes):
                    monkeypatch.setattr(module, "this_share", lambda rank=rank, world=world: Share(rank, world))
                toys.total(method.loss(Batch(whole.x[rank::world], whole.y[rank::world]))).backward()
                method.after_step()
            for parameters in zip(*(method.module.parameters() for method in methods), strict=True):
                mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append(dict(methods[-1].module.named_parameters()))
    one, two = found
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", ["own", "transformers"])
def test_in_a_loop_of_ones_own(kind: str) -> None:
    model = language_model() if kind == "own" else hf.make("mamba").double()
    tokens = batch().x
    method = attach(model, "self-replay", **{**SMALL["self-replay"], "cache": 1})
    method.begin_task(0)
    model(tokens)
    assert method.penalty(tokens).item() == 0
    method.end_task(0)
    method.begin_task(1)
    model(tokens)
    assert method.penalty(tokens).item() == pytest.approx(0, abs=1e-6)  # of logits in half precision
    toys.nudge(model, 0.05)
    model(tokens)
    penalty = method.penalty({"input_ids": tokens} if kind == "transformers" else tokens)
    penalty.backward()
    assert penalty.item() > 0
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_what_makes_no_sense_is_refused() -> None:
    for options, message in (
        ({"sequences": 4, "replay_batch": 5}, "replay_batch=5 is more than sequences=4"),
        ({"weight": -1}, "weight"),
        ({"length": 1}, "length"),
        ({"refresh": 0}, "refresh"),
        ({"cache": -1}, "cache"),
        ({"prefixes": []}, "prefixes"),
        ({"prefixes": [[1], []]}, "a prefix of 0 tokens"),
        ({"length": 3, "prefixes": [[1, 2, 3]]}, "fewer than length=3"),
        ({"prefixes": [[1, VOCABULARY]]}, f"has {VOCABULARY}, but the model's tokens are 0 to {VOCABULARY - 1}"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_method(language_model(), "self-replay", data_kind="language", **options)
    with pytest.raises(ConfigError, match="does not work on images"):
        build_method(toys.vim(), "self-replay")
    with pytest.raises(ConfigError, match="VisionMamba cannot generate"):
        attach(toys.vim(), "self-replay")
    with pytest.raises(ConfigError, match="do not move"):
        start("frozen+self-replay")
