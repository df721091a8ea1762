from __future__ import annotations

import torch
import torch.nn.functional as F

from infssm.methods.bases.er import logit_distance
from tests.compare import identical
from tests.methods import toys
from tests.methods.replaying import build, train
from tests.methods.toys import TASKS


def test_logit_distance_is_the_mean_over_images_and_classes() -> None:
    a = torch.tensor([[1.0, 2.0], [0.0, -1.0]], dtype=torch.float64)
    b = torch.tensor([[0.0, 2.0], [2.0, -4.0]])
    assert float(logit_distance(a, b)) == (1 + 0 + 4 + 9) / 4


def test_stored_logits_are_those_of_the_step_that_stored_them() -> None:
    method = build("der")
    method.begin_task(TASKS[0])
    batch = toys.batch(TASKS[0])
    expected = method.module(batch.x).detach()
    method.loss(batch)
    toys.nudge(method.module)
    method.after_step()
    torch.testing.assert_close(method.base.buffer["logits"], expected.float())


def test_terms_equal_separate_forwards_of_independent_draws() -> None:
    method = build("der++", alpha=0.7, beta=1.3, replay_batch=5)
    train(method, TASKS[0])
    method.begin_task(TASKS[1])
    buffer, batch = method.base.buffer, toys.batch(TASKS[1])
    twin = torch.Generator()
    twin.set_state(buffer.generator.get_state())
    draws = []
    for _ in range(2):
        draws.append(buffer.get(torch.randperm(len(buffer), generator=twin)[:5]))
        torch.randint(2**62, (), generator=twin)  # seed of the augmentation
    assert not identical(draws[0]["image"], draws[1]["image"])
    outputs = [method.module(d["image"].double() / 255) for d in draws]
    terms = method.loss(batch)
    assert list(terms) == ["ce", "logits", "labels"]
    torch.testing.assert_close(terms["ce"], F.cross_entropy(method.module(batch.x), batch.y))
    squared = (outputs[0] - draws[0]["logits"]).square().mean()
    torch.testing.assert_close(terms["logits"], 0.7 * squared)
    picked = outputs[1].log_softmax(1).gather(1, draws[1]["label"][:, None])
    torch.testing.assert_close(terms["labels"], -1.3 * picked.mean())
