from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import Batch, TaskInfo, build_method
from infssm.methods.regularizers.ewc import EWC
from tests.methods import toys
from tests.methods.toys import TASKS

GAMMA, WEIGHT = 0.75, 30.0


def build(model: nn.Module, **options: object) -> tuple[object, EWC]:
    method = build_method(model, "ewc", weight=WEIGHT, **options)
    (ewc,) = method.regularizers
    assert isinstance(ewc, EWC)
    return method, ewc


def fisher_by_hand(model: nn.Module, batches: list[Batch], columns: slice, *, weighted: bool) -> dict[str, Tensor]:
    """Mean over samples of p(y|x) (d log p(y|x) / d theta)^2, full gradients by one backward per sample."""
    model.eval()
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    count = 0
    for batch in batches:
        for image, label in zip(batch.x, batch.y, strict=True):
            model.zero_grad()
            logits = model(image[None])[0, columns]
            log_p = logits[label - (columns.start or 0)] - torch.logsumexp(logits, 0)
            log_p.backward()
            p = log_p.detach().exp() if weighted else 1.0
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] += p * parameter.grad**2
            count += 1
    model.zero_grad()
    model.train()
    return {name: s / count for name, s in sums.items()}


@pytest.mark.parametrize("which", ["AC-direct", "ABC-full"])
@pytest.mark.parametrize("label_weight", ["probability", "one"])
def test_fisher_equals_explicit_per_sample_gradients(which: str, label_weight: str) -> None:
    model, task = toys.vim(), TASKS[1]
    method, ewc = build(model, params=which, label_weight=label_weight)
    batches = toys.loader(task)
    method.begin_task(0)
    method.end_task(task, batches)
    expected = fisher_by_hand(model, batches, slice(2, 4), weighted=label_weight == "probability")
    for key, value in ewc.parameters.take(expected).items():
        torch.testing.assert_close(ewc.importance[key], value, rtol=1e-10, atol=1e-18)
    assert max(float(v.max()) for v in ewc.importance.values()) > 0


@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [
        ("ewc", {"mask": "current"}, slice(2, 4)),
        ("ewc", {"mask": "seen"}, slice(0, 4)),
        ("ewc", {"mask": "full"}, slice(0, 6)),
        ("er+ewc", {"mask": "full"}, slice(0, 6)),
        ("er+ewc", {"mask": "seen"}, slice(0, 4)),
        ("er+ewc", {"mask": "current+seen"}, slice(2, 4)),
        ("der+ewc", {}, slice(0, 6)),
        ("der+++ewc", {}, slice(0, 6)),
        ("lucir+ewc", {"finetune_epochs": 0}, slice(0, 6)),
        ("x-der+ewc", {}, slice(2, 4)),
    ],
)
def test_fisher_follows_the_softmax_of_the_base(name: str, options: dict[str, object], columns: slice) -> None:
    model, task = toys.vim(), TASKS[1]
    method = build_method(model, name, num_classes=6, num_tasks=3, **options)
    (ewc,) = method.regularizers
    assert isinstance(ewc, EWC)
    method.context.begin_task(TaskInfo.of(task), needs_old=False)
    found = ewc.measure(TaskInfo.of(task), toys.loader(task))
    expected = ewc.parameters.take(fisher_by_hand(method.module, toys.loader(task), columns, weighted=True))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-18)


@pytest.mark.parametrize(("mask", "columns"), [("seen", slice(0, 4)), ("full", slice(0, 6))])
def test_fisher_of_prompted_models_follows_the_mask(mask: str, columns: slice) -> None:
    method = build_method(toys.vim(), "l2p-r+ewc", num_classes=6, num_tasks=3, mask=mask)
    assert method.context.columns(TaskInfo.of(TASKS[1])) == slice(columns.stop if mask == "seen" else None)


def test_fisher_of_a_task_without_classes_runs_over_all_logits() -> None:
    model = toys.vim()
    method, ewc = build(model)
    pairs = [(b.x, b.y) for b in toys.loader(TASKS[0])]
    method.end_task(0, pairs)
    expected = fisher_by_hand(model, toys.loader(TASKS[0]), slice(None), weighted=True)
    for key, value in ewc.parameters.take(expected).items():
        torch.testing.assert_close(ewc.importance[key], value, rtol=1e-10, atol=1e-18)


def test_fisher_decays_over_three_tasks() -> None:
    model = toys.vim()
    method, ewc = build(model, gamma=GAMMA)
    expected = None
    for task in TASKS:
        method.begin_task(task)
        toys.nudge(model, seed=task.index)
        block = slice(task.classes[0], task.classes[-1] + 1)
        new = ewc.parameters.take(fisher_by_hand(model, toys.loader(task), block, weighted=True))
        expected = new if expected is None else {k: GAMMA * expected[k] + v for k, v in new.items()}
        method.end_task(task, toys.loader(task))
        for key, value in expected.items():
            torch.testing.assert_close(ewc.importance[key], value, rtol=1e-10, atol=1e-18)


def test_sample_cap_takes_samples_evenly_from_the_batches() -> None:
    model, task = toys.vim(), TASKS[0]
    method, ewc = build(model, fisher_samples=3)
    batches = toys.loader(task)
    # A batch of the user's own class has the attributes of BatchLike and no mask.
    method.end_task(task, [SimpleNamespace(x=b.x, y=b.y, soft=None, raw=None) for b in batches])
    chosen = [Batch(batches[0].x[:1], batches[0].y[:1]), Batch(batches[1].x[:2], batches[1].y[:2])]
    expected = fisher_by_hand(model, chosen, slice(0, 2), weighted=True)
    for key, value in ewc.parameters.take(expected).items():
        torch.testing.assert_close(ewc.importance[key], value, rtol=1e-10, atol=1e-18)


def test_penalty_is_zero_at_the_anchor_and_has_the_closed_form() -> None:
    model = toys.vim()
    method, ewc = build(model, params="AC-direct")
    method.end_task(TASKS[0], toys.loader(TASKS[0]))
    method.begin_task(TASKS[1])
    assert float(ewc.penalty(None)["penalty"].detach()) == 0.0
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
    toys.nudge(model)
    value = ewc.penalty(None)["penalty"]
    expected = sum(
        (ewc.importance[m.key] * (m.take(m.parameter) - m.take(anchor[m.name])) ** 2).sum()
        for m in ewc.parameters.members
    )
    torch.testing.assert_close(value, WEIGHT * expected)
    value.backward()
    weight = model.layers[0].mixer.x_proj.weight
    moved = (weight - anchor["layers.0.mixer.x_proj.weight"]).detach()
    held = ewc.importance["layers.0.mixer.x_proj.weight[5:9]"]
    torch.testing.assert_close(weight.grad[5:9], 2 * WEIGHT * held * moved[5:9])
    assert not weight.grad[1:5].any(), "rows of B are outside AC-direct"
    assert model.layers[0].mixer.in_proj.weight.grad is None
    assert model.head.weight.grad is None


def test_mode_of_the_module_is_as_before_the_pass() -> None:
    model = toys.vim()
    method, _ = build(model)
    model.train()
    model.layers[0].eval()
    method.end_task(TASKS[0], toys.loader(TASKS[0]))
    assert model.training
    assert not model.layers[0].mixer.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_missing_data_is_an_error_that_names_the_fix(name: str) -> None:
    method = build_method(toys.vim(), name)
    with pytest.raises(ConfigError, match=r"end_task\(task, loader\)"):
        method.end_task(TASKS[0])
    with pytest.raises(ConfigError, match="iterated again"):
        method.end_task(TASKS[0], iter([]))
    with pytest.raises(ConfigError, match="of the task before first"):
        method.begin_task(TASKS[1])
    with pytest.raises(ConfigError, match=r"\(x, y\) pairs"):
        method.end_task(TASKS[0], [torch.zeros(2)])


def test_sample_cap_needs_a_length() -> None:
    method, _ = build(toys.vim(), fisher_samples=3)
    with pytest.raises(ConfigError, match="fisher_samples=None"):
        method.end_task(TASKS[0], iter(toys.loader(TASKS[0])))
