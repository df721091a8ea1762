"""Every registered method, and some compositions, through every clause of the contract."""

from __future__ import annotations

import copy
import gc
import io
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from infssm.errors import ConfigError
from infssm.methods import (
    Base,
    Batch,
    Head,
    Method,
    Regularizer,
    build_method,
    canonical_name,
    parse_name,
)
from infssm.methods.core.build import components
from tests.compare import identical
from tests.methods import toys
from tests.methods.toys import CLASSES, FOR_IMAGES, TASKS, Task

COMPOSED = [
    "ewc+lwf-ac",
    "si+inf-ssm-exact",
    "mas+ucl+lwf-abc",
    "er+inf-ssm-exact",
    "er+ewc+si",
    "der+++inf-ssm",
    "lucir+inf-ssm-exact",
    "x-der+inf-ssm-exact",
    "l2p-r+lwf-ac",
    "clfd+inf-ssm-exact",
    "er+inf-ssm-exact+ncm",
    "er+inf-ssm-exact+cosine",
    "lwf+lwf-f+inf-ssm-exact",
    "lucir+lwf+lwf-f",
    "x-der+lwf+ncm",
    "l2p-r+lwf+lwf-f",
    "clfd+lwf+lwf-f",
]
METHODS = [*FOR_IMAGES, *COMPOSED]
KINDS = {kind: [n for n in FOR_IMAGES if issubclass(components[n], kind)] for kind in (Base, Regularizer, Head)}
STEPS = 3
SMALL = {"buffer_size": 8, "measure_at": 1, "fisher_samples": 3, "samples": 4, "steps": 4}


def start(name: str, seed: int = 0, **options: Any) -> Method:
    """A fresh method on a fresh model, with small buffers."""
    model = toys.fitting(name, dtype=torch.float32, seed=seed, img_size=16, depth=1)
    small = {
        f"{component.name}.{key}": value
        for component in parse_name(name).classes
        for key, value in SMALL.items()
        if key in component.Config.model_fields
    }
    return build_method(model, name, num_classes=CLASSES, num_tasks=len(TASKS), **small, **options)


def batch(task: Task, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * task.index + seed)
    raw = torch.randint(256, (4, 1, 16, 16), generator=generator, dtype=torch.uint8)
    y = torch.tensor([task.classes[i % 2] for i in range(4)])
    return Batch(x=raw.float() / 255, y=y, raw=raw)


def data(task: Task) -> list[Batch]:
    return [batch(task, seed) for seed in range(STEPS)]


def begin(method: Method, task: Task) -> torch.optim.Optimizer:
    method.begin_task(task, data(task))
    return optimizer_of(method)


def optimizer_of(method: Method) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in method.module.parameters() if p.requires_grad], "lr": 1e-3}]
    return torch.optim.AdamW(method.param_groups(groups), lr=1e-3)


def step(method: Method, optimizer: torch.optim.Optimizer, one: Batch) -> dict[str, Tensor]:
    terms = method.loss(one)
    toys.total(terms).backward()
    optimizer.step()
    optimizer.zero_grad()
    method.after_step()
    return {key: value.detach().clone() for key, value in terms.items()}


def run(method: Method, task: Task) -> list[dict[str, Tensor]]:
    """One epoch of a task, to its end."""
    optimizer = begin(method, task)
    method.module.train()
    method.begin_epoch(0, 1)
    terms = [step(method, optimizer, one) for one in data(task)]
    method.end_epoch(0, 1)
    method.end_task(task, data(task))
    return terms


def regularizer_terms(terms: dict[str, Tensor], method: Method) -> dict[str, Tensor]:
    names = tuple(f"{r.name}/" for r in method.regularizers)
    return {key: value for key, value in terms.items() if names and key.startswith(names)}


@pytest.mark.parametrize("name", METHODS)
def test_two_tasks_run_and_the_first_is_not_regularized(name: str) -> None:
    method = start(name)
    first, second = run(method, TASKS[0]), run(method, TASKS[1])
    assert all(torch.isfinite(v) for terms in (*first, *second) for v in terms.values())
    assert not any(regularizer_terms(terms, method) for terms in first)
    if method.regularizers:
        assert any(float(v) > 0 for terms in second for v in regularizer_terms(terms, method).values())
    method.module.eval()
    assert method.module(batch(TASKS[1], 9).x).shape == (4, CLASSES)


def compatible_regularizers() -> list[list[str]]:
    """All regularizers in groups: of each family one per group, those without a family in every group."""
    families: dict[str, list[str]] = {}
    for name in KINDS[Regularizer]:
        families.setdefault(components[name].family or name, []).append(name)
    rounds = max(map(len, families.values()))
    return [sorted(members[i % len(members)] for members in families.values()) for i in range(rounds)]


@pytest.mark.parametrize("head", KINDS[Head])
@pytest.mark.parametrize("base", KINDS[Base])
@pytest.mark.parametrize("group", compatible_regularizers(), ids=lambda group: "+".join(group))
def test_every_base_with_every_regularizer_and_every_head(base: str, head: str, group: list[str]) -> None:
    regularizers = group if components[base].why_no_regularizers is None else []
    if components[base].own_classifier and not components[head].fitted:
        with pytest.raises(ConfigError, match="a classifier of its own"):
            parse_name(f"{base}+{head}")
        return
    method = start("+".join([base, *regularizers, head]))
    run(method, TASKS[0])
    terms = run(method, TASKS[1])
    assert all(torch.isfinite(value) for one in terms for value in one.values())
    assert {key.split("/")[0] for key in terms[-1] if "/" in key} == set(regularizers)
    method.module.eval()
    with torch.no_grad():
        logits = method.module(batch(TASKS[1], 9).x)
    assert logits.shape == (4, CLASSES)
    known = slice(2 if components[base].joint else 0, 4)  # joint training was given the images of its last task alone
    assert logits[:, known].isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_in_a_loop_of_ones_own_the_first_penalty_is_zero(name: str) -> None:
    method = start(name, own_loop=True)
    method.begin_task(TASKS[0], data(TASKS[0]))
    x = batch(TASKS[0], 0).x
    method.module(x)
    assert float(method.penalty(x)) == 0.0


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_state_gives_the_identical_next_step(name: str) -> None:
    method = start(name)
    run(method, TASKS[0])
    optimizer = begin(method, TASKS[1])
    method.module.train()
    method.begin_epoch(0, 1)
    step(method, optimizer, batch(TASKS[1], 0))
    file = io.BytesIO()
    torch.save(
        {
            "module": method.module.state_dict(),
            "method": method.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        },
        file,
    )
    expected = [step(method, optimizer, batch(TASKS[1], seed)) for seed in (1, 2)]

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = start(name, seed=5)
    resumed.load_state_dict(saved["method"])
    resumed.module.load_state_dict(saved["module"])
    optimizer = optimizer_of(resumed)
    optimizer.load_state_dict(saved["optimizer"])
    resumed.module.train()
    torch.set_rng_state(saved["rng"])
    found = [step(resumed, optimizer, batch(TASKS[1], seed)) for seed in (1, 2)]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(identical(one[key], other[key]) for key in one), name


def references(method: Method) -> Iterator[Any]:
    """Everything reachable from a method."""
    seen: set[int] = set()
    stack: list[Any] = [method]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(item))
        yield item
        stack += gc.get_referents(item)


EXEMPLAR_FREE = [name for name in METHODS if not parse_name(name)[0].stores_data]


@pytest.mark.parametrize("name", EXEMPLAR_FREE)
def test_exemplar_free_methods_keep_nothing_of_the_data(name: str) -> None:
    method = start(name)
    run(method, TASKS[0])
    kept: list[weakref.ref[Tensor]] = []

    class Loader:
        def __iter__(self) -> Iterator[Batch]:
            for one in data(TASKS[1]):
                fresh = Batch(one.x.clone(), one.y.clone(), raw=one.raw.clone())
                kept.extend(weakref.ref(t) for t in (fresh.x, fresh.y, fresh.raw))
                yield fresh

        def __len__(self) -> int:
            return STEPS

    method.begin_task(TASKS[1], Loader())
    optimizer = optimizer_of(method)
    for one in Loader():
        step(method, optimizer, one)
    method.end_task(TASKS[1], Loader())
    del one
    gc.collect()
    assert len(kept) >= 3 * STEPS
    assert not [ref for ref in kept if ref() is not None], "a batch is still alive"
    assert not kept_images(method, TASKS[1])


def kept_images(method: Method, task: Task) -> bool:
    """Whether any tensor within reach of the method holds an image of the task, as input or raw."""
    images = {tuple(row.flatten().tolist()) for one in data(task) for t in (one.x, one.raw) for row in t}
    tensors = [t for t in references(method) if isinstance(t, Tensor) and t.shape[1:] == (1, 16, 16)]
    return any(tuple(row.flatten().tolist()) in images for t in tensors for row in t.detach())


def test_kept_images_would_be_found() -> None:
    method = start("seq")
    assert not kept_images(method, TASKS[0])
    method.base.state = {"deep": [lambda: None, {"inside": batch(TASKS[0], 0).raw[1:3].clone()}]}
    assert kept_images(method, TASKS[0])


@pytest.mark.parametrize("name", METHODS)
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has no option 'nonsense'"):
        start(name, nonsense=1)


@pytest.mark.parametrize("name", METHODS)
def test_states_of_another_method_are_refused(name: str) -> None:
    method = start(name)
    other = start("joint" if canonical_name(name) == "seq" else "seq")
    with pytest.raises(ConfigError, match="is the state of method"):
        method.load_state_dict(copy.deepcopy(other.state_dict()))
