"""What every method with a memory must do, alone and composed."""

from __future__ import annotations

import copy
import io
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from infssm.errors import ConfigError
from infssm.methods import Batch, Context, ModelPair, Transforms, build_method, parse_name
from infssm.methods.replay.rehearsal import Replay
from infssm.ssm import Observation, record_states
from tests.compare import identical
from tests.methods import toys
from tests.methods.replaying import HOSTS, build, optimizer_of, step, train
from tests.methods.toys import TASKS


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert identical(a[key], b[key]), key


@pytest.mark.parametrize("host", HOSTS)
def test_a_regularizer_of_weight_zero_changes_nothing(host: str) -> None:
    alone, composed = build(host), build(f"{host}+inf-ssm", **{"inf-ssm.weight": 0.0})
    for task in TASKS[:2]:
        for one, other in zip(train(alone, task), train(composed, task), strict=True):
            zero = other.pop("inf-ssm/distance", None)
            assert (zero is None) == (task.index == 0)
            assert zero is None or float(zero) == 0.0
            same(one, other)
    same(alone.module.state_dict(), composed.module.state_dict())


@pytest.mark.parametrize("host", HOSTS)
def test_the_penalty_is_that_of_the_stream_images(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = build(f"{host}+inf-ssm", **{"inf-ssm.weight": 10.0})
    train(method, TASKS[0])
    batches = toys.loader(TASKS[1])
    method.begin_task(TASKS[1], batches)
    method.begin_epoch(0, 1)
    toys.nudge(torch.nn.ParameterList(p for p in method.module.parameters() if p.requires_grad))
    observed: list[Any] = []
    regularizer, compare = method.regularizers[0], Context.compare
    monkeypatch.setattr(
        Context, "compare", lambda self, fractions: observed.append(compare(self, fractions)) or observed[-1]
    )
    term = method.loss(batches[0])["inf-ssm/distance"]
    (pair,) = observed
    new, old = pair.new.states, pair.old.states
    assert new[0].a.shape[:2] == old[0].a.shape[:2] == (len(batches[0].y), new[0].a.shape[1])
    kwargs = {}
    if host == "l2p-r":
        kwargs["indices"] = method.base.pool(method.module.query(batches[0].x)).indices
    with record_states(method.module) as states:
        method.module(batches[0].x, **kwargs)
        alone = states.flat()
    for got, expected in zip(new, alone, strict=True):
        torch.testing.assert_close(got.a, expected.a, rtol=1e-9, atol=1e-12)
    old = method.context.old.states(batches[0].x, **kwargs)
    by_hand = regularizer.penalty(ModelPair(Observation(old), Observation(alone)))["distance"]
    torch.testing.assert_close(term, by_hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("host", HOSTS)
def test_resuming_inside_a_task_is_bit_exact(host: str) -> None:
    name = f"{host}+inf-ssm-exact"
    options = {"inf-ssm-exact.weight": 1.0}
    method = build(name, **options)
    train(method, TASKS[0])
    batches = toys.loader(TASKS[1], batches=4)
    method.begin_task(TASKS[1], batches)
    method.begin_epoch(0, 1)
    optimizer = optimizer_of(method)
    for batch in batches[:2]:
        step(method, batch, optimizer)
    file = io.BytesIO()
    torch.save((method.module.state_dict(), method.state_dict(), optimizer.state_dict()), file)

    resumed = build(name, seed=5, **options)
    file.seek(0)
    module_state, method_state, optimizer_state = torch.load(file, weights_only=True)
    resumed.module.load_state_dict(module_state)
    resumed.load_state_dict(method_state)
    resumed.begin_task(TASKS[1], batches)
    other = optimizer_of(resumed)
    other.load_state_dict(optimizer_state)
    for batch in batches[2:]:
        same(step(method, batch, optimizer), step(resumed, batch, other))
    for one in (method, resumed):
        one.end_epoch(0, 1)
        one.end_task(TASKS[1], batches)
    same(method.module.state_dict(), resumed.module.state_dict())
    same(method.base.buffer.state_dict()["data"], resumed.base.buffer.state_dict()["data"])
    for a, b in zip(train(method, TASKS[2]), train(resumed, TASKS[2]), strict=True):
        same(a, b)


@pytest.mark.parametrize("host", HOSTS)
def test_memory_stays_within_its_size(host: str) -> None:
    method = build(host)
    base = method.base
    assert isinstance(base, Replay)
    sizes = set()
    for task in TASKS:
        train(method, task)
        assert 0 < len(base.buffer) <= base.buffer.capacity
        sizes.add(base.buffer.nbytes)
    assert len(sizes) == 1
    assert base.buffer.capacity == (48 if host == "clfd" else 12)


@pytest.mark.parametrize("host", HOSTS)
def test_saved_state_does_not_follow_later_steps(host: str) -> None:
    method = build(host)
    train(method, TASKS[0])
    state = method.state_dict()
    before = copy.deepcopy(state["components"][host]["buffer"]["data"])
    train(method, TASKS[1])
    same(state["components"][host]["buffer"]["data"], before)


@pytest.mark.parametrize("host", [h for h in HOSTS if h != "clfd"])
def test_raw_images_are_asked_for(host: str) -> None:
    method = build(host)
    batches = [Batch(b.x, b.y) for b in toys.loader(TASKS[0])]
    method.begin_task(TASKS[0], batches)
    asks = method.end_task if host == "lucir" else lambda *_: method.loss(batches[0])
    with pytest.raises(ConfigError, match=r"raw uint8 images"):
        asks(TASKS[0], batches)


@pytest.mark.parametrize("host", ["er", "der", "der++", "lucir", "x-der"])
def test_a_first_task_from_a_checkpoint_fills_the_buffer_in_one_pass(host: str) -> None:
    method = build(host)
    batches = toys.loader(TASKS[0])
    method.begin_task(TASKS[0], batches)
    method.end_task(TASKS[0], batches)
    buffer = method.base.buffer
    assert len(buffer) == 8
    raw = torch.cat([b.raw for b in batches])
    labels = torch.cat([b.y for b in batches])
    found = [int(torch.nonzero((raw == image).flatten(1).all(1)).flatten()) for image in buffer["image"]]
    assert sorted(found) == list(range(8))
    assert identical(labels[found], buffer["label"])
    if "logits" in buffer.stores:
        expected = method.module(torch.cat([b.x for b in batches])).detach()[found]
        torch.testing.assert_close(buffer["logits"], expected.float())
    fresh = build(host)
    fresh.begin_task(TASKS[0])
    with pytest.raises(ConfigError, match="loader"):
        fresh.end_task(TASKS[0])


@pytest.mark.parametrize("host", ["l2p-r", "clfd"])
def test_a_first_task_from_a_checkpoint_is_refused_where_parts_must_be_trained(host: str) -> None:
    method = build(host)
    method.begin_task(TASKS[0], toys.loader(TASKS[0]))
    with pytest.raises(ConfigError, match="must train task 0"):
        method.end_task(TASKS[0], toys.loader(TASKS[0]))


def test_transforms_of_the_loop_are_used() -> None:
    calls: list[tuple[torch.Size, torch.dtype]] = []

    def augment(raw: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        calls.append((raw.shape, raw.dtype))
        return raw.float() / 255 + torch.rand(raw.shape, generator=generator)

    method = build("er", replay_batch=3, transforms=Transforms(train=augment))
    train(method, TASKS[0])
    calls.clear()
    method.begin_task(TASKS[1])
    method.loss(toys.batch(TASKS[1]))
    assert calls == [(torch.Size([3, 1, 8, 8]), torch.uint8)]


def test_pairs_without_meaning_are_refused() -> None:
    for one, other in itertools.combinations(HOSTS, 2):
        with pytest.raises(ConfigError, match="only one base"):
            parse_name(f"{one}+{other}")
    with pytest.raises(ConfigError, match="nothing to regularize"):
        parse_name("joint+inf-ssm")
    with pytest.raises(ConfigError, match="twice"):
        parse_name("er+inf-ssm+inf-ssm")
    base, regularizers, _ = parse_name("der+++inf-ssm+")
    assert (base.name, [r.name for r in regularizers]) == ("der++", ["inf-ssm+"])


@pytest.mark.parametrize(
    ("host", "regularizer"),
    [
        *itertools.product(["lucir", "l2p-r", "clfd"], ["ucl", "mas"]),
        ("er", "ewc"),
        ("der++", "si"),
        ("x-der", "lwf-abc"),
    ],
)
def test_other_regularizers_stand_on_any_host(host: str, regularizer: str) -> None:
    method = build(f"{host}+{regularizer}")
    train(method, TASKS[0], epochs=1)
    history = train(method, TASKS[1], epochs=1)
    assert all(torch.isfinite(value) for terms in history for value in terms.values())
    assert any(key.startswith(f"{regularizer}/") for key in history[-1])


def test_methods_need_to_know_their_tasks() -> None:
    with pytest.raises(ConfigError, match="num_tasks"):
        build_method(toys.vim(), "lucir", num_classes=6)
    method = build_method(toys.vim(), "x-der", buffer_size=12)
    method.begin_task(0)
    with pytest.raises(ConfigError, match="which classes belong"):
        method.loss(toys.batch(TASKS[0]))


@pytest.mark.parametrize("name", HOSTS)
def test_soft_targets_are_refused(name: str) -> None:
    method = build(name)
    method.begin_task(TASKS[0], toys.loader(TASKS[0]))
    method.begin_epoch(0, 1)
    batch = toys.batch(TASKS[0])
    with pytest.raises(ConfigError, match="trains on class labels"):
        method.loss(replace(batch, soft=torch.full((len(batch.y), toys.CLASSES), 1 / toys.CLASSES)))
