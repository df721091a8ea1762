from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from infssm.methods import Method, Transforms
from infssm.methods.bases import xder
from infssm.methods.bases.xder import XDER
from tests.compare import identical
from tests.methods import toys
from tests.methods.replaying import build, train
from tests.methods.toys import TASKS


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_revision_by_hand() -> None:
    stored = torch.tensor([[2.0, 0.0, 9.0, 9.0], [2.0, 0.0, 9.0, 9.0], [-1.0, 0.0, 9.0, 9.0]], dtype=torch.float64)
    new = torch.tensor([[7.0, 7.0, 4.0, 1.0], [7.0, 7.0, 1.5, -3.0], [7.0, 7.0, 2.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 0])
    revised = xder.revised_logits(stored, new, labels, slice(2, 4), 0.85)
    expected = [
        [2.0, 0.0, 0.85 * 2.0, 0.85 * 2.0 / 4.0],  # 4 > 2: scaled so that the largest is gamma times the true one
        [2.0, 0.0, 1.5, -3.0],  # 1.5 < 2: taken as they are
        [-1.0, 0.0, -0.85, -0.425],  # a negative true logit flips signs
    ]
    torch.testing.assert_close(revised, torch.tensor(expected, dtype=torch.float64))
    assert stored[0, 2] == 9.0


def test_heads_that_start_at_zero_are_revised_to_finite_logits() -> None:
    stored = torch.tensor([[-1.0, 0.5, 9.0, 9.0], [-1.0, 0.5, 9.0, 9.0]])
    new = torch.tensor([[7.0, 7.0, 0.0, 0.0], [7.0, 7.0, -0.0, -3.0]])  # largest 0, above a negative true logit
    revised = xder.revised_logits(stored, new, torch.tensor([0, 0]), slice(2, 4), 0.85)
    torch.testing.assert_close(revised, torch.cat([stored[:, :2], new[:, 2:]], dim=1))


def test_contrast_by_hand() -> None:
    views, labels, tau, base = F.normalize(normal(3, 2, 4), dim=2), [0, 1, 0], 0.5, 0.25
    anchors = [(i, v) for i in range(3) for v in range(2)]
    total = 0.0
    for i, v in anchors:
        scores = {a: float(views[i, v] @ views[a]) / tau for a in anchors if a != (i, v)}
        log_sum = math.log(sum(math.exp(s) for s in scores.values()))
        positives = [s - log_sum for a, s in scores.items() if labels[a[0]] == labels[i]]
        total -= sum(positives) / len(positives)
    expected = (tau / base) * total / 2  # summed over images, mean over their two views
    got = xder.supervised_contrast(views, torch.tensor(labels), temperature=tau, base_temperature=base)
    assert float(got) == pytest.approx(expected, rel=1e-12)


def test_consistency_is_the_mean_over_heads_and_images() -> None:
    logits, labels = normal(3, 2, 6), torch.tensor([0, 1, 0])
    options = {"temperature": 0.5, "base_temperature": 0.5}
    by_head = [
        xder.supervised_contrast(F.normalize(logits[:, :, h : h + 2], dim=2), labels, **options) for h in (0, 2, 4)
    ]
    got = xder.consistency(logits, labels, widths=[2, 2, 2], **options)
    torch.testing.assert_close(got, sum(by_head) / (3 * 3))


def test_contrast_has_finite_gradients() -> None:
    logits = normal(3, 2, 4).requires_grad_()
    labels = torch.tensor([0, 1, 0])
    assert torch.autograd.gradcheck(
        lambda z: xder.consistency(z, labels, widths=[2, 2], temperature=0.5, base_temperature=0.5), logits
    )


def test_distances_by_hand() -> None:
    z, y = normal(3, 4), normal(3, 4, seed=1)

    def similarities(rows: torch.Tensor) -> list[list[float]]:
        gram = [[float(a @ b) for b in rows] for a in rows]
        return [[value / sum(abs(v) for v in row) for value in row] for row in gram]

    pairs = zip(similarities(z), similarities(y), strict=True)
    expected = sum((a - b) ** 2 for p, q in pairs for a, b in zip(p, q, strict=True)) / 9
    assert float(xder.similarity_distance(z, y)) == pytest.approx(expected, rel=1e-12)
    views = torch.stack((z, normal(3, 4, seed=2)), dim=1)
    parts = [xder.similarity_distance(views[:, v, h], y[:, h]) for h in (slice(0, 2), slice(2, 4)) for v in (0, 1)]
    torch.testing.assert_close(xder.distance_preservation(views, y, widths=[2, 2]), sum(parts) / 4)


def test_margins_average_what_violates_them() -> None:
    good = torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    bad = torch.tensor([[2.0], [1.0], [-0.1]], dtype=torch.float64)
    gaps = [2.0 + 0.3 - 1.0, -0.1 + 0.3 - 0.0]
    assert float(xder.head_margin(bad, good, 0.3)) == pytest.approx(sum(gaps) / 2)
    assert float(xder.head_margin(bad - 10, good, 0.3)) == 0.0
    logits = normal(4, 6).requires_grad_()
    p = logits[:, :4].softmax(1)
    gap = p[:, :2].detach().amax(1) + 0.3 - p[:, 2:4].amax(1)
    expected = gap[gap > 0].mean()
    got = xder.past_margin(logits, slice(0, 2), slice(2, 4), 0.3)
    torch.testing.assert_close(got, expected)
    (one,), (other,) = torch.autograd.grad(got, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(one, other)


def test_heads_and_repetitions() -> None:
    logits = torch.arange(12.0).view(2, 6)
    assert xder.true_head(logits, torch.tensor([3, 0]), [2, 2, 2]).tolist() == [[2.0, 3.0], [6.0, 7.0]]
    unequal = xder.true_head(logits, torch.tensor([2, 3]), [3, 1, 2])
    assert unequal.tolist() == [[0.0, 1.0, 2.0], [9.0, -math.inf, -math.inf]]
    assert xder.first_occurrence(torch.tensor([4, 2, 4, 1, 2])).tolist() == [True, True, False, True, False]


def at_task(index: int, **options: Any) -> tuple[Method, XDER]:
    method = build("x-der", **options)
    for task in TASKS[:index]:
        train(method, task)
    method.begin_task(TASKS[index], toys.loader(TASKS[index]))
    assert isinstance(method.base, XDER)
    return method, method.base


def test_terms_of_a_step_by_hand() -> None:
    method, base = at_task(1, past_constraint=True, replay_batch=4, dp_weight=0.6, margin=0.5)
    config, batch, buffer, module = base.config, toys.batch(TASKS[1]), base.buffer, method.module
    toys.nudge(module)
    twin = torch.Generator()
    twin.set_state(buffer.generator.get_state())
    draws = []
    for count in (4, 4, 3):
        slots = torch.randperm(len(buffer), generator=twin)[:count]
        draws.append((slots, buffer.get(slots)))
        torch.randint(2**62, (), generator=twin)  # seed of the augmentation
    (slots1, first), (slots2, second), (slots3, third) = draws
    z = module(batch.x)
    z1, z2 = (module(d["image"].double() / 255) for d in (first, second))
    raw = torch.cat((third["image"], batch.raw)).repeat_interleave(2, dim=0)
    views = module(raw.double() / 255).view(-1, 2, 6)
    terms = method.loss(batch)
    close = torch.testing.assert_close
    close(terms["stream"], F.cross_entropy(z[:, 2:4], batch.y - 2))
    close(terms["logits"], 0.3 * (z1 - first["logits"]).square().mean())
    close(terms["labels"], 1.8 * F.cross_entropy(z2[:, :2], second["label"]))
    labels = torch.cat((third["label"], batch.y))
    contrast = xder.consistency(views[:, :, 4:], labels, widths=[2], temperature=0.07, base_temperature=0.07)
    close(terms["consistency"], config.lambda_cons * contrast)
    # The distance term compares with stored logits as this step has revised them: every first revision is accepted.
    now = dict(zip([*slots2.tolist(), *slots1.tolist()], torch.cat((z2, z1)).detach().float(), strict=True))
    replayed = [i for i, slot in enumerate(slots3.tolist()) if slot in now]
    stored = third["logits"].clone()
    fresh_logits = torch.stack([now[int(slots3[i])] for i in replayed])
    stored[replayed] = xder.revised_logits(
        stored[replayed], fresh_logits, third["label"][replayed], slice(2, None), config.gamma
    )
    assert not torch.equal(stored[:, 4:], third["logits"][:, 4:])
    distances = [xder.similarity_distance(views[:3, v, 4:], stored[:, 4:].double()) for v in (0, 1)]
    close(terms["distances"], 0.6 * sum(distances) / 2)
    fresh = [i for i, s in enumerate(slots2.tolist()) if s not in slots1.tolist()]
    seen = torch.cat((z1, z2[fresh]))
    owner = torch.cat((first["label"], second["label"][fresh])) // 2
    own = [row[2 * head : 2 * head + 2].amax() for row, head in zip(seen, owner, strict=True)]
    good = torch.cat((z[:, 2:4].amax(1), torch.stack(own)))
    gap = torch.cat((z, seen))[:, 4:].amax(1) + 0.5 - good
    close(terms["future"], 0.1 * gap[gap > 0].mean())
    p = z[:, :4].softmax(1)
    gap = p[:, :2].amax(1) + 0.5 - p[:, 2:].amax(1)
    close(terms["past"], 0.1 * gap[gap > 0].mean())


def test_replayed_logits_are_revised_with_probability_one_over_their_count() -> None:
    method, base = at_task(1, replay_batch=4)
    toys.nudge(method.module)
    buffer, before = base.buffer, base.buffer["logits"].clone()
    method.loss(toys.batch(TASKS[1]))
    touched = base.updates > 0
    assert 4 <= int(touched.sum()) <= 8
    assert float(base.updates.max()) == 1.0
    changed = (buffer["logits"] != before).any(1)
    assert identical(changed, touched[: len(buffer)])  # the first time always
    assert identical(buffer["logits"][:, :2], before[:, :2])  # past columns stay
    outputs = method.module(buffer["image"].double() / 255).detach().float()
    expected = xder.revised_logits(before, outputs, buffer["label"], slice(2, None), 0.85)
    torch.testing.assert_close(buffer["logits"][changed], expected[changed])
    accepted = torch.zeros(len(buffer))
    base.updates.fill_(3.0)
    for _ in range(300):
        stale = buffer["logits"].clone()
        base._revise(torch.arange(len(buffer)), torch.randn(len(buffer), 6))
        accepted += (buffer["logits"] != stale).any(1)
        base.updates.fill_(3.0)
    assert abs(float(accepted.mean()) / 300 - 1 / 4) < 0.03


def test_no_future_terms_on_the_last_task() -> None:
    method, _ = at_task(2)
    assert set(method.loss(toys.batch(TASKS[2]))) == {"stream", "logits", "labels"}
    first, _ = at_task(0)
    assert set(first.loss(toys.batch(TASKS[0]))) == {"stream", "consistency", "future"}
    off, _ = at_task(0, future_constraint=False)
    assert set(off.loss(toys.batch(TASKS[0]))) == {"stream", "consistency"}


def test_the_buffer_is_balanced_after_every_task() -> None:
    method = build("x-der", buffer_size=10)
    shares = []
    for task in TASKS:
        train(method, task)
        shares.append(torch.bincount(method.base.buffer["label"], minlength=6).tolist())
        assert identical(method.base.updates, torch.zeros(10))
    assert shares[0] == [4, 4, 0, 0, 0, 0]  # all there are
    assert shares[1][:2] == [2, 2]
    assert sorted(shares[1][2:4]) == [3, 3]
    assert shares[2][:4] == [1, 1, 1, 1]
    assert sorted(shares[2][4:]) == [3, 3]


def test_stored_logits_after_a_task_by_hand() -> None:
    method, base = at_task(1)
    old = base.buffer.get(torch.arange(len(base.buffer)))
    batches = toys.loader(TASKS[1])
    method.end_task(TASKS[1], batches)
    buffer = base.buffer
    outputs = method.module(buffer["image"].double() / 255).detach().float()
    new = buffer["label"] >= 2
    expected = xder.revised_logits(outputs, outputs, buffer["label"], slice(0, 2), 0.85)
    torch.testing.assert_close(buffer["logits"][new], expected[new])
    kept = torch.cat([torch.nonzero(old["label"] == c).flatten()[:3] for c in (0, 1)])
    assert identical(buffer["image"][~new], old["image"][kept])
    expected = xder.revised_logits(old["logits"][kept], outputs[~new], old["label"][kept], slice(2, None), 0.85)
    torch.testing.assert_close(buffer["logits"][~new], expected)
    assert set(buffer["task"].tolist()) == {1}


def test_strong_views_come_from_the_loop() -> None:
    calls: list[torch.Size] = []

    def strong(raw: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        calls.append(raw.shape)
        return raw.double() / 255 + torch.rand(raw.shape, generator=generator)

    method, _ = at_task(1, transforms=Transforms(strong=strong))
    calls.clear()
    method.loss(toys.batch(TASKS[1]))
    assert calls == [torch.Size([2 * (3 + 4), 1, 8, 8])]
