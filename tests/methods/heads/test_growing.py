"""Heads that are taught at any time: in any order, in parts, with classes added later, and with classes forgotten."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import Batch, FittedHead, Method, attach, list_methods, parse_name
from infssm.methods.core.head import load_rows
from infssm.methods.heads.trained import CosineClassifier
from infssm.models.features import features
from tests.methods import toys

FITTED = [name for name in list_methods() if parse_name(name).head.fitted]
EXACT = ["ncm", "lda", "gda", "ranpac"]
# The directions of etf depend on the number of all classes, so a head with one class less is another head.
FORGETTING = [name for name in FITTED if name not in ("ranpac", "etf")]
SMALL = {"slca": {"samples": 4}, "ranpac": {"width": 32}}
Part = dict[int, range]
"""Classes with the numbers of their images."""


def images(part: Part, *, move_down_above: int = 100) -> Batch:
    """The images of a part: image i of a class is always the same, whoever asks."""
    x, y = [], []
    for label, numbers in part.items():
        rng = torch.Generator().manual_seed(label)
        own = torch.randn(100, 1, 8, 8, generator=rng) + 0.5 * torch.randn(1, 1, 8, 8, generator=rng)
        x.append(own[list(numbers)])
        y += [label - (label > move_down_above)] * len(numbers)
    return Batch(torch.cat(x), torch.tensor(y))


def start(head: str, classes: int = 4, **options: Any) -> Method:
    """A method on a float32 model whose backbone does not depend on the number of classes."""
    model = toys.vim(dtype=torch.float32)
    torch.manual_seed(1)
    model.head = nn.Linear(model.head.in_features, classes)
    return attach(model, f"frozen+{head}", num_classes=classes, **SMALL.get(head, {}), **options)


def teach(method: Method, *parts: Part, move_down_above: int = 100) -> Method:
    for part in parts:
        index = 0 if method.context.task is None else method.context.task.index + 1
        method.begin_task(index)
        method.end_task(index, [images(part, move_down_above=move_down_above)])
    method.module.eval()
    return method


@torch.no_grad()
def logits(method: Method) -> Tensor:
    found: Tensor = method.module(images({k: range(90, 100) for k in range(4)}).x)
    return found


def assert_equal_to_rounding(found: Tensor, expected: Tensor) -> None:
    spread = float(expected.max() - expected.min())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * spread)


@pytest.mark.parametrize("head", EXACT)
def test_the_order_of_teaching_does_not_matter(head: str) -> None:
    """Property 3: A then B = B then A = both at once; likewise with more images of known classes."""
    a, b = {0: range(40), 1: range(30)}, {2: range(50), 3: range(20)}
    more = {1: range(30, 60), 2: range(50, 70)}
    at_once = logits(teach(start(head), {0: range(40), 1: range(60), 2: range(70), 3: range(20)}))
    for parts in ((a, b, more), (b, a, more), (a, {**b, 1: range(30, 60)}, {2: range(50, 70)}), (more, b, a)):
        assert_equal_to_rounding(logits(teach(start(head), *parts)), at_once)


@pytest.mark.parametrize("head", FITTED)
def test_the_state_of_fewer_classes_is_that_of_more_with_the_rest_empty(head: str) -> None:
    a, b = {0: range(20), 1: range(12)}, {2: range(15), 1: range(12, 20)}
    small, large = teach(start(head, 2), a), teach(start(head, 3), a)
    grown = start(head, 3)
    rows = {key: value.clone() for key, value in grown.module.head.state_dict().items()}
    grown.load_state_dict(copy.deepcopy(small.state_dict()))
    for method in (grown, large):
        method.module.eval()
    assert torch.equal(logits(grown), logits(large))
    grown.head.withdraw()  # the trained classifier: rows of known classes as they were, the new one as it was built
    assert torch.equal(grown.module.head.weight[:2], small.state_dict()["head"]["trained"]["weight"])
    assert torch.equal(grown.module.head.weight[2:], rows["weight"][2:])
    assert torch.equal(logits(teach(grown, b)), logits(teach(large, b)))
    with pytest.raises(ConfigError, match="statistics of 3 classes, and the head has 2"):
        start(head, 2).load_state_dict(grown.state_dict())


@pytest.mark.parametrize(
    ("head", "prior"), [(head, "class") for head in FORGETTING] + [("lda", "task"), ("gda", "task")]
)
def test_a_class_that_is_forgotten_was_never_there(head: str, prior: str) -> None:
    """The state, and the head that follows from it, whether the class came alone or with others.

    Bit for bit where it came alone: features depend on the other images of a batch in their last digits.
    """
    options = {"prior": prior} if head in ("lda", "gda") else {}
    parts: list[Part] = [{0: range(20), 1: range(12)}, {2: range(15)}, {3: range(18), 1: range(12, 20)}]
    for label in (1, 2, 3):
        method = teach(start(head, **options), *parts)
        method.head.forget(label)
        never = start(head, 3, **options)
        rest = [{k: v for k, v in part.items() if k != label} for part in parts]
        teach(never, *[part for part in rest if part], move_down_above=label)
        exact = {"rtol": 0, "atol": 0} if label == 2 else {"rtol": 1e-3, "atol": 1e-6}
        torch.testing.assert_close(method.head.state_dict(), never.head.state_dict(), **exact)
        grown = start(head, 3, **options)
        grown.head.load_state_dict(method.head.state_dict())
        grown.head.refit()
        grown.module.eval()
        assert_equal_to_rounding(logits(grown), logits(never))
        method.head.refit()  # the head itself has the class back, without images, at the end
        assert_equal_to_rounding(logits(method)[:, :3], logits(never))
        assert (logits(method)[:, 3] == -torch.inf).all()


def test_ranpac_says_why_it_cannot_forget() -> None:
    with pytest.raises(ConfigError, match=r"one Gram matrix of the images of all classes.*use gda"):
        teach(start("ranpac"), {0: range(9), 1: range(9)}).head.forget(0)


@pytest.mark.parametrize("first_model", [False, True])
@pytest.mark.parametrize("head", FITTED)
def test_the_statistics_alone_give_the_module_again(head: str, first_model: bool) -> None:
    method = teach(start(head, first_model=first_model), {0: range(20), 1: range(12)}, {2: range(15), 3: range(9)})
    other = start(head, first_model=first_model)
    other.head.load_state_dict(copy.deepcopy(method.head.state_dict()))
    other.head.refit()
    other.module.eval()
    assert torch.equal(logits(other), logits(method))


@pytest.mark.parametrize("head", FITTED)
def test_distances_are_mahalanobis(head: str) -> None:
    """To the class mean by the class's blended covariance (gda) or the pooled one, shrunk; of ncm on the sphere."""
    part = {0: range(60), 1: range(50), 2: range(40)}
    method = teach(start(head), part)
    assert isinstance(method.head, FittedHead)
    batch = images(part)
    with torch.no_grad():
        given = features(method.module, batch.x)
    x, y = given.double().numpy(), batch.y.numpy()
    if head == "ncm":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    own = [np.cov(x[y == k].T, bias=True) for k in range(3)]
    pooled = np.average(own, axis=0, weights=[60, 50, 40])
    found = method.head.distances(given)
    assert found is not None
    for label in range(3):
        covariance = 0.25 * own[label] + 0.75 * pooled if head in ("gda", "mda") else pooled
        covariance = 0.999 * covariance + 0.001 * np.diag(covariance).mean() * np.eye(len(covariance))
        gap = x - x[y == label].mean(axis=0)
        expected = np.einsum("nd,nd->n", gap, np.linalg.solve(covariance, gap.T).T)
        np.testing.assert_allclose(found[:, label], expected, rtol=1e-3, atol=1e-3 * expected.mean())
    assert (found[:, 3] == torch.inf).all()


@pytest.mark.parametrize("head", FITTED)
def test_leaving_images_out_is_never_having_seen_them(head: str) -> None:
    method = teach(start(head), {0: range(50), 1: range(40)}, {2: range(45), 3: range(30)})
    held = images({k: range(25, 30) for k in range(4)})
    with torch.no_grad():
        left = method.head.leaving_out(method.head.transformed(features(method.module, held.x)), held.y)
    parts: list[Part] = [{0: range(50), 1: range(40)}, {2: range(45), 3: range(30)}]
    expected = teach(start(head), *[{k: [i for i in v if not 25 <= i < 30] for k, v in p.items()} for p in parts])
    with torch.no_grad():
        given = features(method.module, held.x)
        before = method.head.fitted_module(given)
        found, wanted = left.fitted_module(given), expected.head.fitted_module(given)
    if head == "ranpac" and left.ridge != expected.head.ridge:
        expected.head.ridge = left.ridge  # other images are held out to choose it
        expected.head.refit()
        wanted = expected.head.fitted_module(given)
    assert_equal_to_rounding(found, wanted)
    assert torch.equal(method.head.fitted_module(given), before)


@pytest.mark.parametrize("head", FITTED)
def test_new_domains_of_known_classes_are_learned_beside_the_old(head: str) -> None:
    """Two clusters per class, one in each task: after both tasks the images of both are told apart."""
    rng = torch.Generator().manual_seed(0)
    prototypes = 2 * torch.randn(2, 3, 1, 8, 8, generator=rng)

    def domain(index: int) -> Batch:
        y = torch.arange(3).repeat(30)
        return Batch(prototypes[index][y] + 0.1 * torch.randn(90, 1, 8, 8, generator=rng), y)

    method = start(head, 3)
    for index in range(2):
        method.begin_task(index)
        method.end_task(index, [domain(index)])
    method.module.eval()
    with torch.no_grad():
        right = [(method.module(b.x).argmax(1) == b.y).float().mean().item() for b in map(domain, range(2))]
    assert min(right) > 0.6, right


def test_classifiers_load_from_those_of_fewer_classes() -> None:
    for build in (lambda k: nn.Linear(5, k), lambda k: CosineClassifier(5, [k])):
        small, large = build(2), build(4)
        before = {key: value.clone() for key, value in large.state_dict().items()}
        load_rows(large, small.state_dict())
        for key, value in large.state_dict().items():
            known = len(small.state_dict()[key])
            assert torch.equal(value[:known], small.state_dict()[key])
            assert torch.equal(value[known:], before[key][known:])
