from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from infssm.errors import ConfigError
from infssm.methods.bases.lucir import LUCIR, herd, imprinted, less_forget, less_forget_weight, margin_ranking
from infssm.models.features import features as features_of
from tests.compare import identical
from tests.methods import toys
from tests.methods.replaying import build, optimizer_of, step, train
from tests.methods.toys import TASKS


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def test_less_forget_is_one_minus_the_mean_cosine() -> None:
    new, old = normal(3, 4), normal(3, 4, seed=1)
    expected = sum(1 - cosine(a, b) for a, b in zip(new.tolist(), old.tolist(), strict=True)) / 3
    assert float(less_forget(new, old)) == pytest.approx(expected, rel=1e-12)
    assert float(less_forget(new, 3 * new)) == pytest.approx(0.0, abs=1e-15)


def test_less_forget_weight_over_tasks() -> None:
    mammoth = [less_forget_weight(5.0, t, "mammoth", range(2 * t, 2 * t + 2)) for t in (1, 2, 3)]
    paper = [less_forget_weight(5.0, t, "paper", range(2 * t, 2 * t + 2)) for t in (1, 2, 3)]
    assert mammoth == pytest.approx([0.0, 5.0, 5.0 * math.sqrt(2)])
    assert paper == pytest.approx([5.0, 5.0 * math.sqrt(2), 5.0 * math.sqrt(3)])
    assert less_forget_weight(5.0, 1, "paper", range(50, 60)) == pytest.approx(5.0 * math.sqrt(5))


def test_margin_ranking_by_hand() -> None:
    cosines = torch.tensor(
        [
            [0.5, 0.1, 0.4, 0.6, 0.3, 0.9],  # label 0: against 0.6 and 0.4; the future class 5 does not count
            [0.2, 0.9, 0.8, 0.1, 0.0, 0.0],  # label 1: against 0.8 and 0.1
            [0.0, 0.0, 0.2, 0.3, 0.9, 0.0],  # label 3: not an old class
        ],
        dtype=torch.float64,
    )
    labels = torch.tensor([0, 1, 3])
    loss = margin_ranking(cosines, labels, classes=range(2, 5), count=2, margin=0.2)
    terms = [max(0, 0.2 - (0.5 - 0.6)), max(0, 0.2 - (0.5 - 0.4)), max(0, 0.2 - (0.9 - 0.8)), 0]
    assert float(loss) == pytest.approx(sum(terms) / 4, rel=1e-12)
    assert float(margin_ranking(cosines[2:], labels[2:], classes=range(2, 5), count=2, margin=0.2)) == 0.0


def test_imprinted_weights_have_mean_directions_and_the_length_of_old_ones() -> None:
    sums, old = normal(2, 3), torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    weights = imprinted(sums, old)
    torch.testing.assert_close(weights.norm(dim=1), torch.full((2,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(F.cosine_similarity(weights, sums, dim=1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(imprinted(sums, None).norm(dim=1), torch.ones(2, dtype=torch.float64))


def test_a_new_task_is_imprinted_and_old_blocks_stay() -> None:
    method = build("lucir")
    train(method, TASKS[0])
    head, batches = method.base.head, toys.loader(TASKS[1])
    old = head.weights[0].detach().clone()
    method.begin_task(TASKS[1], batches)
    features = F.normalize(features_of(method.module, torch.cat([b.x for b in batches])), dim=1)
    labels = torch.cat([b.y for b in batches])
    means = torch.stack([features[labels == c].mean(0) for c in (2, 3)])
    expected = F.normalize(means, dim=1) * old.norm(dim=1).mean()
    torch.testing.assert_close(head.weights[1].detach(), expected.detach())
    optimizer = optimizer_of(method)
    method.begin_epoch(0, 1)
    for batch in batches:
        step(method, batch, optimizer)
    assert identical(head.weights[0], old)
    assert not identical(head.weights[1], expected)


def test_terms_of_a_step_by_hand() -> None:
    method = build("lucir", lambda_base=2.0, lambda_rule="paper", lambda_mr=0.7, margin=0.5)
    train(method, TASKS[0])
    reference = copy.deepcopy(method.module).eval()
    batches = toys.loader(TASKS[1])
    method.begin_task(TASKS[1], batches)
    method.begin_epoch(0, 1)
    with torch.no_grad():  # what is frozen, the blocks of other tasks, stays: the old model shares it
        for parameter in method.module.parameters():
            parameter += 0.01 * torch.randn_like(parameter) * parameter.requires_grad
    base = method.base
    assert isinstance(base, LUCIR)
    due = base.buffer.get(base.order[:4])  # 8 buffer images for 8 of the stream: half of them with half the stream
    x = torch.cat((batches[0].x, due["image"].double() / 255))
    y = torch.cat((batches[0].y, due["label"]))
    new, old = features_of(method.module, x), features_of(reference, x).detach()
    weights = torch.cat(list(base.head.weights))
    cosines = F.normalize(new, dim=1) @ F.normalize(weights, dim=1).T
    terms = method.loss(batches[0])
    torch.testing.assert_close(terms["ce"], F.cross_entropy(base.head.scale * cosines, y))
    torch.testing.assert_close(terms["less_forget"], 2.0 * (1 - F.cosine_similarity(new, old, dim=1)).mean())
    hinges = [0.5 - (row[label] - c) for row, label in zip(cosines, y, strict=True) if label < 2 for c in row[2:4]]
    torch.testing.assert_close(terms["margin"], 0.7 * torch.stack(hinges).clamp(min=0).mean())


def test_every_buffer_image_comes_once_per_epoch() -> None:
    method = build("lucir")
    train(method, TASKS[0])
    batches = toys.loader(TASKS[1], batches=3)
    method.begin_task(TASKS[1], batches)
    for _ in range(2):
        method.begin_epoch(0, 2)
        due = [method.base._due(4) for _ in batches]
        assert [len(d) for d in due] == [2, 3, 3]
        assert sorted(torch.cat(due).tolist()) == list(range(8))


@pytest.mark.parametrize("sizes", [(4, 4, 3), (4, 4), (4, 2)])
def test_the_share_of_a_smaller_last_batch_is_replayed(sizes: tuple[int, ...]) -> None:
    """Whether the loop leaves a smaller last batch out or not, the epoch shows the whole buffer once."""
    method = build("lucir")
    train(method, TASKS[0])
    batches = [toys.batch(TASKS[1], n, seed=i) for i, n in enumerate(sizes)]
    method.begin_task(TASKS[1], batches)
    for trained in (batches, [b for b in batches if len(b.y) == 4]):
        method.begin_epoch(0, 2)
        due = [method.base._due(len(b.y)) for b in trained]
        assert sorted(torch.cat(due).tolist()) == list(range(8))


@pytest.mark.parametrize(("option", "batch_size"), [(None, 3), (5, 5)])
def test_fine_tuning_takes_the_batches_of_training(option: int | None, batch_size: int) -> None:
    method = build("lucir", finetune_batch=option, finetune_epochs=1)
    batches = [toys.batch(TASKS[0], 3, seed=i) for i in range(4)]
    method.begin_task(TASKS[0], batches)
    sizes: list[int] = []
    handle = method.base.head.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    method.end_task(TASKS[0], batches)
    handle.remove()
    whole, rest = divmod(len(method.base.buffer), batch_size)
    assert sizes == [batch_size] * whole + [rest] * (rest > 0)


def test_exemplars_are_herded_and_trimmed_to_the_quota() -> None:
    method = build("lucir", buffer_size=8, finetune_epochs=0)
    batches = toys.loader(TASKS[0], batches=3)
    method.begin_task(TASKS[0], batches)
    method.end_task(TASKS[0], batches)
    raw, labels = torch.cat([b.raw for b in batches]), torch.cat([b.y for b in batches])
    features = features_of(method.module, raw.double() / 255).detach()
    chosen = {c: raw[labels == c][herd(features[labels == c], 4)] for c in (0, 1)}
    assert identical(method.base.buffer["image"], torch.cat([chosen[0], chosen[1]]))
    train(method, TASKS[1])
    buffer = method.base.buffer
    assert buffer["label"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert identical(buffer["image"][:4], torch.cat([chosen[0][:2], chosen[1][:2]]))


def test_fine_tuning_moves_the_current_block_and_the_scale_alone() -> None:
    trained, untouched = build("lucir", finetune_lr=0.5), build("lucir", finetune_epochs=0)
    for method in (trained, untouched):
        train(method, TASKS[0])
    one, other = trained.module.state_dict(), untouched.module.state_dict()
    moved = {key for key in one if not identical(one[key], other[key])}
    assert moved == {"head.weights.0", "head.scale"}
    buffer = trained.base.buffer
    x, y = buffer["image"].double() / 255, buffer["label"]
    assert F.cross_entropy(trained.module(x), y) < F.cross_entropy(untouched.module(x), y)


def test_a_first_task_from_a_checkpoint_is_imprinted() -> None:
    method = build("lucir", imprint=False, finetune_epochs=0)
    batches = toys.loader(TASKS[0])
    method.begin_task(TASKS[0], batches)
    method.end_task(TASKS[0], batches)
    features = F.normalize(features_of(method.module, torch.cat([b.x for b in batches])), dim=1)
    labels = torch.cat([b.y for b in batches])
    expected = F.normalize(torch.stack([features[labels == c].mean(0) for c in (0, 1)]), dim=1)
    torch.testing.assert_close(method.base.head.weights[0].detach(), expected.detach())


def test_what_lucir_cannot_do_without_is_named() -> None:
    with pytest.raises(ConfigError, match="has no classifier layer"):
        build("lucir", model=torch.nn.Linear(2, 6))
    method = build("lucir")
    train(method, TASKS[0])
    with pytest.raises(ConfigError, match="loader"):
        method.begin_task(TASKS[1])
