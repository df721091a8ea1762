"""Every fitted head through the clauses of the head's contract; what a head computes is tested beside it."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.learner.export import TOLERANCE, export_model
from infssm.learner.loop import weights_of
from infssm.learner.setup import load_weights
from infssm.methods import Batch, Method, attach, build_method, list_methods, parse_name
from infssm.models import find_classifier
from infssm.models.features import features
from tests.methods import toys
from tests.methods.toys import CLASSES, TASKS

FITTED = [name for name in list_methods() if parse_name(name).head.fitted]
HOSTS = ["seq", "lucir", "l2p-r", "clfd"]
"""Bases that leave the classifier where it is, replace it, and wrap the model twice over."""
HELD = "inf-ssm-exact"


def start(name: str, seed: int = 0, **options: Any) -> Method:
    options = {"weight": 1.0, **options} if HELD in name else options
    return build_method(toys.vim(seed=seed), name, num_classes=CLASSES, num_tasks=len(TASKS), **options)


def run(method: Method, task: toys.Task, n: int = 8) -> None:
    batches = toys.loader(task, n=n)
    method.begin_task(task, batches)
    optimizer = torch.optim.SGD([p for p in method.module.parameters() if p.requires_grad], lr=1e-2)
    method.begin_epoch(0, 1)
    for batch in batches:
        toys.total(method.loss(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step()
    method.end_epoch(0, 1)
    method.end_task(task, batches)


def logits(method: Method, task: toys.Task = TASKS[0]) -> Tensor:
    method.module.eval()
    with torch.no_grad():
        found: Tensor = method.module(toys.batch(task, 8, seed=5).x)
    return found


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("head", FITTED)
def test_the_classifier_in_training_is_back_when_a_task_begins(head: str, host: str) -> None:
    method = start(f"{host}+{HELD}+{head}")
    trained = find_classifier(method.module).module
    run(method, TASKS[0])
    fitted = find_classifier(method.module).module
    assert fitted is not trained
    assert not any(p.requires_grad for p in fitted.parameters())
    assert logits(method).shape == (8, CLASSES)
    kept = {key: value.clone() for key, value in trained.state_dict().items()}
    old = find_classifier(method.context.old.module).module
    assert type(old) is type(trained)
    assert all(torch.equal(value, kept[key]) for key, value in old.state_dict().items())
    method.begin_task(TASKS[1], toys.loader(TASKS[1]))
    assert find_classifier(method.module).module is trained


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("head", FITTED)
def test_a_checkpoint_holds_the_head_and_the_classifier_in_training(head: str, host: str) -> None:
    method = start(f"{host}+{head}")
    run(method, TASKS[0])
    run(method, TASKS[1])
    file = io.BytesIO()
    torch.save({"method": method.state_dict(), "module": method.module.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = start(f"{host}+{head}", seed=3)
    other.load_state_dict(saved["method"])
    other.module.load_state_dict(saved["module"])
    assert torch.equal(logits(other), logits(method))
    for one in (method, other):
        torch.manual_seed(0)
        run(one, TASKS[2])
    assert torch.equal(logits(other, TASKS[2]), logits(method, TASKS[2]))
    for one in (method, other):
        one.head.withdraw()
    assert torch.equal(logits(other, TASKS[2]), logits(method, TASKS[2]))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("head", FITTED)
def test_saved_weights_rebuild_the_head_that_was_reached(head: str, host: str, tmp_path: Path) -> None:
    method = start(f"{host}+{head}")
    run(method, TASKS[0])
    (tmp_path / "task_00.safetensors").write_bytes(weights_of(method.weights()))
    expected = logits(method)
    other = start(f"{host}+{head}", seed=3)
    for _ in range(2):  # also over a head that is installed
        load_weights(other, tmp_path / "task_00.safetensors")
        assert torch.equal(logits(other), expected)
    if host == "seq":
        model = toys.vim(seed=4)
        load_weights(model, tmp_path / "task_00.safetensors")
        method.head.withdraw()
        assert all(torch.equal(value, method.module.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("head", FITTED)
def test_heads_are_fitted_to_the_plain_images(head: str) -> None:
    """``loader`` may be augmented, ``images`` are not; where there is only one, it serves."""
    method, twin = start(head), start(head)
    plain = toys.loader(TASKS[0], n=8)
    noisy = [Batch(one.x + torch.randn_like(one.x), one.y) for one in plain]
    for one in (method, twin):
        one.begin_task(TASKS[0])
    method.end_task(TASKS[0], noisy, plain)
    twin.end_task(TASKS[0], plain)
    assert torch.equal(logits(method), logits(twin))
    with pytest.raises(ConfigError, match=f"{head} is fitted to features .*loader"):
        method.end_task(TASKS[0])


@pytest.mark.parametrize("head", FITTED)
def test_autocast_changes_neither_the_fit_nor_the_scores(head: str) -> None:
    """In bfloat16 scores have 8 bits: lda lost 2.3 points of accuracy on digits."""
    fitted, scores = [], []
    for inside in (False, True):
        method = build_method(toys.vim(dtype=torch.float32), head, num_classes=CLASSES, num_tasks=len(TASKS))
        batches = toys.loader(TASKS[0], n=8, dtype=torch.float32)
        method.begin_task(TASKS[0])
        rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16, enabled=inside), torch.no_grad():
            method.end_task(TASKS[0], batches)
            module = find_classifier(method.module).module
            scores.append(module(rows))
            assert copy.deepcopy(module)(rows.bfloat16()).dtype == torch.float32
        fitted.append(module.state_dict())
    assert scores[1].dtype == torch.float32
    torch.testing.assert_close(scores[1], scores[0])
    torch.testing.assert_close(fitted[1], fitted[0])


def test_the_head_of_the_documentation_can_be_exported(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "extend.md").read_text("utf-8")
    source = re.search(r"class NearestPoint.*?(?=\n\n\n)", page, re.DOTALL)
    assert source is not None
    names: dict[str, Any] = {"torch": torch}
    exec(source.group(), names)
    means = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    means[2] = torch.inf  # a class that was not met yet
    example = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    assert export_model(names["NearestPoint"](means), example, tmp_path / "head.onnx") < TOLERANCE


@pytest.mark.parametrize("head", FITTED)
def test_joint_training_starts_the_statistics_anew(head: str) -> None:
    method, fresh = start(f"joint+{head}"), start(f"joint+{head}")
    both = [*toys.loader(TASKS[0], n=8), *toys.loader(TASKS[1], n=8)]
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0], toys.loader(TASKS[0], n=8))
    method.begin_task(TASKS[1])
    toys.nudge(method.module)
    toys.nudge(fresh.module)
    method.end_task(TASKS[1], both)
    fresh.begin_task(TASKS[1])
    fresh.end_task(TASKS[1], both)
    assert torch.equal(logits(method), logits(fresh))


@pytest.mark.parametrize("head", FITTED)
def test_classes_without_images_score_minus_infinity(head: str) -> None:
    method = start(head)
    run(method, TASKS[0])
    assert logits(method)[:, :2].isfinite().all()
    assert (logits(method)[:, 2:] == -torch.inf).all()
    run(method, TASKS[1])
    assert logits(method)[:, :4].isfinite().all()


@pytest.mark.parametrize("head", FITTED)
def test_clusters_are_told_apart_after_all_tasks(head: str) -> None:
    """Images around one prototype per class, tasks after one another, a model that stays: all classes are known."""
    method = attach(toys.vim(), head, num_classes=CLASSES)
    generator = torch.Generator().manual_seed(0)
    prototypes = 2 * torch.randn(CLASSES, 1, 8, 8, generator=generator, dtype=torch.float64)

    def images(task: toys.Task) -> Batch:
        y = torch.tensor(task.classes).repeat(20)
        return Batch(prototypes[y] + 0.1 * torch.randn(40, 1, 8, 8, generator=generator, dtype=torch.float64), y)

    for task in TASKS:
        method.begin_task(task)
        method.end_task(task, [images(task)])
    method.module.eval()
    with torch.no_grad():
        right = [(method.module(b.x).argmax(1) == b.y).float().mean().item() for b in map(images, TASKS)]
    assert min(right) == 1.0


@pytest.mark.parametrize("head", FITTED)
def test_heads_work_on_models_without_state_space_layers(head: str) -> None:
    model = nn.Sequential()
    model.body, model.fc = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, dtype=torch.float64)), nn.Linear(5, CLASSES)
    model.fc.double()
    method = attach(model, head)
    for task in TASKS[:2]:
        method.begin_task(task)
        method.end_task(task, toys.loader(task, n=8))
    assert method.module(toys.batch(TASKS[0]).x).shape == (4, CLASSES)


def test_names_with_heads() -> None:
    parts = parse_name("er+inf-ssm-exact+ncm")
    assert [c.name for c in parts.classes] == ["er", "inf-ssm-exact", "ncm"]
    assert [c.name for c in parse_name("ncm").classes] == ["seq", "ncm"]
    with pytest.raises(ConfigError, match="only one head can make the logits, got ncm and linear"):
        parse_name("er+ncm+linear")
    with pytest.raises(ConfigError, match="lucir trains a classifier of its own; leave linear out"):
        parse_name("lucir+linear")
    with pytest.raises(ConfigError, match="has no classifier layer"):
        attach(nn.Linear(2, 2), "ncm")


def test_ncm_is_the_cosine_with_the_mean_of_normalised_features() -> None:
    method = start("ncm", drift="none")
    run(method, TASKS[0])
    first = find_classifier(method.module).module.means[:2].clone()
    run(method, TASKS[1])
    batches, model = toys.loader(TASKS[1], n=8), method.module.eval()
    with torch.no_grad():
        rows = [(f / f.norm(), int(y)) for b in batches for f, y in zip(features(model, b.x), b.y, strict=True)]
        means = [torch.stack([f for f, y in rows if y == c]).mean(0) for c in TASKS[1].classes]
        x = toys.batch(TASKS[1], 3, seed=9).x
        f = features(model, x)
        expected = torch.nn.functional.cosine_similarity(f[:, None], torch.stack(means)[None], dim=2)
        torch.testing.assert_close(model(x)[:, 2:4], expected)
    assert torch.equal(find_classifier(model).module.means[:2], first)  # nothing moves means of old classes


def test_states_of_a_fitted_head_need_the_same_head() -> None:
    method, plain = start("ncm"), start("seq")
    run(method, TASKS[0])
    with pytest.raises(ConfigError, match="the state has a fitted head, but linear is not one"):
        plain.load_weights(copy.deepcopy(method.weights()))


@pytest.mark.parametrize("host", ["clfd", "l2p-r"])
def test_wrapped_backbones_hand_out_what_their_classifier_is_given(host: str) -> None:
    module = start(host).module.eval()
    x = toys.batch(TASKS[0], 4, seed=5).x
    with torch.no_grad():
        given = features(module, x)
        assert given.shape == (4, find_classifier(module).in_features)
        assert torch.equal(find_classifier(module).module(given), module(x))
        assert not torch.equal(given, features(module.model, x))


@pytest.mark.parametrize("host", ["clfd", "l2p-r"])
def test_models_without_the_steps_of_a_backbone_are_refused_alike(host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host} works on embed, encode, pool.* of the model.*infssm.list_models"):
        build_method(nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)), host, num_classes=CLASSES, num_tasks=3)
