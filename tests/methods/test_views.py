"""More than one look at an image, more than one model: what fitted heads see beside the classifier's features."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import infssm
from infssm.errors import ConfigError
from infssm.learner.loop import weights_of
from infssm.learner.setup import load_weights
from infssm.methods import Base, Batch, Method, Regularizer, build_method, list_methods, parse_name
from infssm.methods.core.build import components
from infssm.methods.core.passes import capture
from infssm.models.features import features, training_weights
from tests.methods import toys
from tests.methods.toys import CLASSES, FOR_IMAGES, TASKS

FITTED = [name for name in list_methods() if parse_name(name).head.fitted]
BASES = [name for name in list_methods() if issubclass(components[name], Base)]
REGULARIZERS = [name for name in FOR_IMAGES if issubclass(components[name], Regularizer)]
ALL = {"mean_token": True, "mirror": True, "first_model": True}
SMALL = {"samples": 4, "buffer_size": 8, "fisher_samples": 3, "measure_at": 1, "width": 16}


def start(name: str, seed: int = 0, **options: Any) -> Method:
    for component in parse_name(name).classes:
        known = component.Config.model_fields
        options |= {f"{component.name}.{key}": value for key, value in SMALL.items() if key in known}
    sizes = {"num_classes": CLASSES, "num_tasks": len(TASKS)}
    return build_method(toys.fitting(name, seed=seed, img_size=16), name, **sizes, **options)


def batch(task: toys.Task, n: int = 4, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(1000 * task.index + seed)
    raw = torch.randint(256, (n, 1, 16, 16), generator=generator, dtype=torch.uint8)
    y = torch.tensor([task.classes[i % len(task.classes)] for i in range(n)])
    return Batch(x=raw.double() / 255, y=y, raw=raw)


def run(method: Method, task: toys.Task, n: int = 8) -> None:
    batches = [batch(task, n, seed) for seed in range(2)]
    method.begin_task(task, batches)
    method.module.train()
    trained = [p for p in method.module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(method.param_groups([{"params": trained}]), lr=1e-2)
    method.begin_epoch(0, 1)
    for one in batches:
        toys.total(method.loss(one)).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step()
    method.end_epoch(0, 1)
    method.end_task(task, batches)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Copies of the same tensors, or the same steps taken twice."""
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def logits(method: Method) -> Tensor:
    method.module.eval()
    with torch.no_grad():
        found: Tensor = method.module(batch(TASKS[0], 8, seed=5).x)
    return found


@torch.no_grad()
def seen(model: Any, x: Tensor) -> np.ndarray:
    """Class token and mean token, mean over the image and its mirror image, one side after the other: [n, 2d]."""
    sides = [model.forward_features(side) for side in (x, torch.flip(x, dims=(3,)))]
    return np.mean([np.concatenate([model.pool(f).numpy(), f.numpy().mean(axis=1)], axis=1) for f in sides], axis=0)


def density(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Log density of a Gaussian without its constant: [n]."""
    gap = x - mean
    return -0.5 * np.einsum("ni,ij,nj->n", gap, np.linalg.inv(covariance), gap) - 0.5 * np.linalg.slogdet(covariance)[1]


def drifted(old: np.ndarray, new: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """The ridge map of one model's features: matrix and shift."""
    x, r = old - old.mean(axis=0), new - old
    second = x.T @ x / len(x)
    change = np.linalg.solve(second + ridge * np.diag(second).mean() * np.eye(len(second)), x.T @ r / len(x))
    return np.eye(len(second)) + change, r.mean(axis=0) - old.mean(axis=0) @ change


def test_gda_of_two_models_is_the_mean_of_their_log_densities() -> None:
    """Float64, from images alone: statistics, the second model's drift, blending, shrinkage and prior by numpy."""
    alpha, beta, ridge = 0.1, 0.5, 0.05
    method = start("lwf-f+gda", **ALL, alpha=alpha, beta=beta, ridge=ridge, prior="task")
    tasks = [toys.Task(0, (0, 1, 2)), toys.Task(1, (3, 4))]
    models, images = [], [batch(task, 30, seed=3) for task in tasks]
    for task, one in zip(tasks, images, strict=True):
        method.begin_task(task, [one])
        toys.nudge(method.module, 0.05, seed=task.index)
        models.append(start("seq").module)
        models[-1].load_state_dict(method.module.state_dict())
        method.end_task(task, [one])
    x, expected = batch(TASKS[0], 8, seed=5).x, np.zeros((8, 5))
    for late in (models[0], models[1]):  # the first task's, and the one that went on learning
        stages = (models[0], late)
        means, covariances, counts = [], [], []
        for stage, one in zip(stages, images, strict=True):
            rows = seen(stage, one.x)
            for label in one.y.unique().tolist():
                own = rows[(one.y == label).numpy()]
                means.append(own.mean(axis=0))
                covariances.append(np.cov(own.T, bias=True))
                counts.append(len(own))
        matrix, shift = drifted(seen(models[0], images[1].x), seen(late, images[1].x), ridge)
        for label in range(3):
            means[label] = means[label] @ matrix + shift
            covariances[label] = matrix.T @ covariances[label] @ matrix
        pooled = np.average(covariances, axis=0, weights=counts)
        for label in range(5):
            blended = (1 - beta) * covariances[label] + beta * pooled
            shrunk = (1 - alpha) * blended + alpha * np.diag(blended).mean() * np.eye(len(blended))
            expected[:, label] += density(seen(late, x), means[label], shrunk) / 2
    expected -= np.log([3, 3, 3, 2, 2])
    found = logits(method)
    assert (found[:, 5] == -torch.inf).all()
    # Class covariances are kept in float32, whose rounding the inverses of shrunk covariances (α 0.1) enlarge.
    np.testing.assert_allclose(found[:, :5].numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_gda_of_several_blocks_is_the_mean_of_their_log_densities() -> None:
    """Float64, by numpy, with features taken at the blocks themselves: the residual after each through the final norm.

    The final norm's weights are drawn at random, so that leaving it out shows.
    """
    alpha, beta, ridge = 0.1, 0.5, 0.05
    options = {"mean_token": True, "token_spread": True, "mirror": True, "blocks": [2, 1]}
    method = start("seq+gda", **options, alpha=alpha, beta=beta, ridge=ridge)
    toys.nudge(method.module, 0.3, seed=9)
    tasks = [toys.Task(0, (0, 1, 2)), toys.Task(1, (3, 4))]
    models, images = [], [batch(task, 30, seed=3) for task in tasks]
    for task, one in zip(tasks, images, strict=True):
        method.begin_task(task, [one])
        toys.nudge(method.module, 0.05, seed=task.index)
        models.append(copy.deepcopy(method.module).eval())
        method.end_task(task, [one])
    x, expected = batch(TASKS[0], 8, seed=5).x, np.zeros((8, 5))
    for block in (0, 1):
        rows = [seen_after(block, models[index], images[index].x) for index in (0, 1)]
        matrix, shift = drifted(*(seen_after(block, model, images[1].x) for model in models), ridge)
        means, covariances, counts = [], [], []
        for index, one in enumerate(images):
            for label in tasks[index].classes:
                own = rows[index][(one.y == label).numpy()]
                mean, covariance = own.mean(axis=0), np.cov(own.T, bias=True)
                if index == 0:
                    mean, covariance = mean @ matrix + shift, matrix.T @ covariance @ matrix
                means.append(mean)
                covariances.append(covariance)
                counts.append(len(own))
        pooled = np.average(covariances, axis=0, weights=counts)
        for label in range(5):
            blended = (1 - beta) * covariances[label] + beta * pooled
            shrunk = (1 - alpha) * blended + alpha * np.diag(blended).mean() * np.eye(len(blended))
            expected[:, label] += density(seen_after(block, models[1], x), means[label], shrunk) / 2
    found = logits(method)[:, :5].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@torch.no_grad()
def seen_after(block: int, model: Any, x: Tensor) -> np.ndarray:
    """As :func:`seen`, after ``block``: its mixer's output is added to the residual and normalised by hand."""
    sides = []
    for side in (x, torch.flip(x, dims=(3,))):
        with contextlib.ExitStack() as stack:
            outputs = [stack.enter_context(capture(layer.mixer)) for layer in model.layers]
            model(side)
        total = (model.embed(side) + sum(one[0] for one in outputs[: block + 1])).numpy()
        size = np.sqrt((total**2).mean(axis=-1, keepdims=True) + model.norm_f.eps)
        tokens = total / size * model.norm_f.weight.detach().numpy()
        parts = [tokens[:, model.cls_index], tokens.mean(axis=1), tokens.std(axis=1), tokens.max(axis=1)]
        sides.append(np.concatenate(parts, axis=1))
    mean: np.ndarray = np.mean(sides, axis=0)
    return mean


@pytest.mark.parametrize("head", FITTED)
def test_without_motion_two_models_are_one(head: str) -> None:
    """After the first task both are the same model."""
    one, two = (start(head, first_model=first) for first in (False, True))
    for method in (one, two):
        method.begin_task(TASKS[0])
        method.end_task(TASKS[0], [batch(TASKS[0], 12)])
    if head in ("gda", "lda", "ncm"):
        torch.testing.assert_close(logits(two), logits(one), rtol=1e-5, atol=1e-6)
    assert logits(two).shape == (8, CLASSES)


@pytest.mark.parametrize("name", ["lwf-f+gda", "er+inf-ssm-exact+lda", "frozen+ncm"])
def test_training_does_not_change(name: str) -> None:
    weight = {"inf-ssm-exact.weight": 1.0} if "inf-ssm-exact" in name else {}
    plain, looking = start(name, **weight), start(name, **weight, **ALL)
    for method in (plain, looking):
        torch.manual_seed(0)
        run(method, TASKS[0])
        run(method, TASKS[1])
        method.head.withdraw()
    assert same(plain.module.state_dict(), looking.module.state_dict())


@pytest.mark.parametrize("head", FITTED)
def test_the_second_model_learns_and_the_first_stays(head: str) -> None:
    method = start(head, **ALL)
    run(method, TASKS[0])
    first = {key: value.clone() for key, value in method.head.state_dict()["first"].items()}
    assert not any(key.startswith("head.") for key in first)
    assert all(torch.equal(method.module.state_dict()[key], value) for key, value in first.items())
    run(method, TASKS[1])
    assert same(method.head.state_dict()["first"], first)
    assert any(not torch.equal(method.module.state_dict()[key], value) for key, value in first.items())


@pytest.mark.parametrize("options", [{"first_model": True}, {"start_model": True}, ALL], ids=["first", "start", "all"])
@pytest.mark.parametrize("head", FITTED)
def test_going_on_from_a_checkpoint_is_going_on(head: str, options: dict[str, bool]) -> None:
    method = start(f"lwf-f+{head}", **options)
    run(method, TASKS[0])
    run(method, TASKS[1])
    file = io.BytesIO()
    torch.save({"method": method.state_dict(), "module": method.module.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = start(f"lwf-f+{head}", seed=3, **options)
    other.load_state_dict(saved["method"])
    other.module.load_state_dict(saved["module"])
    assert torch.equal(logits(other), logits(method))
    for one in (method, other):
        torch.manual_seed(0)
        run(one, TASKS[2])
    assert torch.equal(logits(other), logits(method))


@pytest.mark.parametrize("head", FITTED)
def test_saved_weights_rebuild_it_and_a_bare_model(head: str, tmp_path: Path) -> None:
    method = start(head, **ALL)
    run(method, TASKS[0])
    run(method, TASKS[1])
    (tmp_path / "task_01.safetensors").write_bytes(weights_of(method.weights()))
    expected, weights = logits(method), method.weights()
    other = start(head, seed=3, **ALL)
    for _ in range(2):  # also over a head that is installed
        load_weights(other, tmp_path / "task_01.safetensors")
        assert torch.equal(logits(other), expected)
    model = toys.vim(seed=4, img_size=16)
    load_weights(model, tmp_path / "task_01.safetensors")
    method.head.withdraw()
    assert same(model.state_dict(), method.module.state_dict())
    assert same(training_weights(model, weights), dict(method.module.state_dict()))


@pytest.mark.parametrize("base", BASES)
def test_every_base_takes_it_or_says_why_not(base: str) -> None:
    regularizers = ["lwf-f"] if components[base].why_no_regularizers is None else []
    name = "+".join([base, *regularizers, "gda"])
    if base in ("l2p-r", "clfd", "generative"):
        with pytest.raises(ConfigError, match="gda: mean_token works on a bare backbone"):
            start(name, **ALL)
        return
    method = start(name, **ALL)
    run(method, TASKS[0])
    run(method, TASKS[1])
    met = slice(2, 4) if components[base].joint else slice(4)  # statistics of all data start anew
    assert torch.isfinite(logits(method)[:, met]).all()


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_every_regularizer_goes_with_it(regularizer: str) -> None:
    weight = {"inf-ssm-exact.weight": 1.0} if regularizer == "inf-ssm-exact" else {}
    method = start(f"{regularizer}+gda", **weight, **ALL)
    run(method, TASKS[0])
    run(method, TASKS[1])
    assert torch.isfinite(logits(method)[:, :4]).all()


def test_states_are_those_of_the_image_under_the_model_now() -> None:
    method, x = start("gda", **ALL), batch(TASKS[0], 4).x
    run(method, TASKS[0])
    run(method, TASKS[1])
    bare = start("seq").module
    bare.load_state_dict(training_weights(bare, method.weights()))
    found = []
    for module in (bare.eval(), method.module.eval()):
        with infssm.record_states(module) as states, torch.no_grad():
            module(x)
        found.append({name: [space.c for space in states[name]] for name in states})
    for name, expected in found[0].items():
        assert all(torch.equal(c, other) for c, other in zip(expected, found[1][name], strict=True))


def test_a_model_trained_elsewhere_is_the_first() -> None:
    method = start("gda", first_model=True)
    before = {key: value.clone() for key, value in method.module.state_dict().items() if not key.startswith("head.")}
    run(method, TASKS[1])
    assert same(method.head.state_dict()["first"], before)


def test_the_model_before_the_first_task_is_kept_and_its_features_come_first() -> None:
    method = start("ncm", start_model=True)
    before = copy.deepcopy(method.module)
    run(method, TASKS[0])
    run(method, TASKS[1])
    kept = method.head.state_dict()["first"]
    assert same(kept, {k: v for k, v in before.state_dict().items() if not k.startswith("head.")})
    x = batch(TASKS[1]).x
    method.module.eval()
    means = method.head.fitted_module.means
    scores = method.module(x)
    method.head.withdraw()
    rows = torch.cat([features(before.eval(), x), features(method.module, x)], dim=1)
    expected = nn.functional.normalize(rows, dim=1) @ means.T
    torch.testing.assert_close(scores[:, :4], expected[:, :4], rtol=1e-6, atol=1e-7)
    with pytest.raises(ConfigError, match=r"begin with begin_task\(0\), or use first_model"):
        start("ncm", start_model=True).begin_task(TASKS[1])
    with pytest.raises(ConfigError, match="choose first_model or start_model"):
        start("ncm", start_model=True, first_model=True)


@pytest.mark.parametrize("option", ["mean_token", "token_spread", "mirror", "first_model", "start_model"])
def test_it_is_for_images(option: str) -> None:
    model = toys.model("s4d_nano")
    with pytest.raises(ConfigError, match=f"gda: {option} is for images, and the samples are series"):
        build_method(model, "gda", num_classes=CLASSES, data_kind="series", **{option: True})
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    other.get_classifier = lambda: other[1]  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=f"{option} works on a bare backbone .* not on a Sequential"):
        build_method(other, "gda", num_classes=CLASSES, **{option: True})


def test_a_mean_of_tokens_has_no_second_one() -> None:
    with pytest.raises(ConfigError, match="VMamba are the mean of its tokens"):
        build_method(toys.model("vmamba_nano"), "gda", num_classes=CLASSES, mean_token=True)


@pytest.mark.parametrize(
    ("model", "blocks", "why"),
    [
        ("vmamba_nano", [1], "is for Vim, whose blocks all have one width, not for VMamba"),
        ("vim_nano", [1, 99], r"=\[1, 99\], but the model has \d blocks"),
        ("vim_nano", [1, 1], r"=\[1, 1\] names one twice"),
        ("vim_nano", [0], "greater than or equal to 1"),
        ("vim_nano", [], "at least 1 item"),
    ],
)
def test_blocks_that_a_model_does_not_have_are_refused(model: str, blocks: list[int], why: str) -> None:
    with pytest.raises(ConfigError, match=f"blocks.*{why}"):
        build_method(toys.model(model), "gda", num_classes=CLASSES, blocks=blocks)


@pytest.mark.parametrize(("name", "options"), [("gda", {}), ("lda", ALL)])
def test_a_head_that_a_bare_model_cannot_hold_is_not_saved_with_it(
    name: str, options: dict[str, bool], tmp_path: Path
) -> None:
    method = start(name, **options)
    method.module.save_pretrained(tmp_path)
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0], [batch(TASKS[0], 12)])
    with pytest.raises(ConfigError, match="stands in the classifier's place, which from_pretrained cannot build"):
        method.module.save_pretrained(tmp_path)
    method.head.withdraw()
    method.module.save_pretrained(tmp_path)
