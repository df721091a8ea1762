"""The cosine head: what it computes, where it starts, and that runs keep it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from infssm.errors import ConfigError
from infssm.learner.loop import weights_of
from infssm.learner.setup import load_weights
from infssm.methods import Method, attach, build_method, parse_name
from infssm.methods.heads.trained import CosineClassifier
from infssm.models import find_classifier
from infssm.models.features import features
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def start(name: str = "cosine", seed: int = 0, **options: Any) -> Method:
    return build_method(toys.vim(seed=seed), name, num_classes=CLASSES, num_tasks=len(TASKS), **options)


def test_scores_are_scaled_cosines():
    head = CosineClassifier(3, [2, 2], scale=2.5).double()
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.cat(list(head.weights)).tolist()
    expected = [[2.5 * cosine(row, w) for w in weights] for row in x.tolist()]
    torch.testing.assert_close(head(x), torch.tensor(expected, dtype=torch.float64))
    assert (head.in_features, head.out_features) == (3, 4)
    assert torch.autograd.gradcheck(lambda rows, *_: head(rows), (x.requires_grad_(), *head.parameters()))


def test_only_the_block_in_training_and_a_learned_scale_have_gradients():
    head = CosineClassifier(3, [2, 2, 2])
    head.train_block(1)
    assert [w.requires_grad for w in head.weights] == [False, True, False]
    assert head.scale.requires_grad
    assert not CosineClassifier(3, [2], learn_scale=False).scale.requires_grad


def test_it_starts_from_the_directions_of_the_models_classifier():
    """A model trained elsewhere keeps what it knows; rows that are zero have no direction and are drawn."""
    model, x = toys.vim(), toys.batch(TASKS[0]).x
    own = find_classifier(model).module.weight
    with torch.no_grad():
        own[1] = 0
    rows = own.detach().clone()
    attach(model, "cosine", num_classes=CLASSES, scale=3.0)
    given = features(model, x)
    known = [c for c in range(CLASSES) if c != 1]
    expected = 3 * torch.nn.functional.cosine_similarity(given[:, None], rows[None, known], dim=2)
    torch.testing.assert_close(model(x)[:, known], expected)
    assert model(x)[:, 1].isfinite().all()
    assert find_classifier(model).module.weights[0][1].any()


def test_a_fixed_scale_stays_and_a_learned_one_moves():
    for learn_scale in (False, True):
        method = start(scale=4.0, learn_scale=learn_scale)
        method.begin_task(TASKS[0])
        optimizer = torch.optim.SGD([p for p in method.module.parameters() if p.requires_grad], lr=0.1)
        toys.total(method.loss(toys.batch(TASKS[0]))).backward()
        optimizer.step()
        assert (find_classifier(method.module).module.scale.item() != 4.0) == learn_scale


def test_saved_weights_rebuild_it_beside_replay_and_a_penalty(tmp_path: Path):
    name = "er+inf-ssm-exact+cosine"
    method, other = start(name), start(name, seed=3)
    with torch.no_grad():
        find_classifier(method.module).module.scale.fill_(7.0)
    (tmp_path / "task_00.safetensors").write_bytes(weights_of(method.weights()))
    load_weights(other, tmp_path / "task_00.safetensors")
    x = toys.batch(TASKS[0]).x
    assert torch.equal(other.module.eval()(x), method.module.eval()(x))


def test_lucir_trains_its_own():
    assert isinstance(find_classifier(start("lucir").module).module, CosineClassifier)
    with pytest.raises(ConfigError, match="lucir trains a classifier of its own; leave cosine out"):
        parse_name("lucir+cosine")
