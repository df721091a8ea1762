"""`nullspace` against its equations, written out in float64 from the scan's inputs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter1d
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import Method, build_method
from infssm.methods.bases.nullspace import elbow, projection
from infssm.models import create_model
from infssm.ops import ScanInputs
from tests.compare import identical
from tests.methods import toys
from tests.methods.toys import TASKS


def spectrum(size: int, seed: int = 0) -> Tensor:
    """Values of many sizes, descending."""
    values = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (8 * values.sort(descending=True).values).exp()


def method_after_task_0(**options: Any) -> Method:
    method = build_method(toys.vim(), "nullspace", **options)
    method.begin_task(TASKS[0])
    method.end_task(TASKS[0], toys.loader(TASKS[0]))
    return method


@pytest.mark.parametrize("size", [5, 127, 128, 300])
def test_the_null_space_begins_at_the_largest_second_difference(size: int) -> None:
    for seed in range(5):
        values = spectrum(size, seed).numpy()
        smooth, cut = values, 0
        if size >= 128:
            smooth, cut = gaussian_filter1d(values, sigma=10), int(size * 0.03 / 2)
        bends = {
            i: smooth[i - 1] - 2 * smooth[i] + smooth[i + 1] for i in range(1 + cut, size - 1 - cut)
        }  # (v[i-1] - v[i]) - (v[i] - v[i+1])
        assert elbow(torch.from_numpy(values)) == max(bends, key=bends.__getitem__)
    assert elbow(torch.ones(2)) == 0
    assert elbow(torch.tensor([5.0, 3.0, 3.0, 3.0])) == 3, "of equal values the last"


@pytest.mark.parametrize("size", [6, 130])
def test_projections_are_those_of_the_paper_of_the_release_and_of_the_control(size: int) -> None:
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    values = spectrum(size)
    moment, start = basis * values @ basis.T, elbow(values)
    null, rank, eye = basis[:, start:], size - start, torch.eye(size, dtype=torch.float64)
    expected = {
        "projector": 0.9 * null @ null.T + 0.1 * eye,
        "released": 0.9 * (null @ null.T) / torch.linalg.norm(null @ null.T) + 0.1 * eye,
        "rate": (0.9 / np.sqrt(rank) + 0.1) * eye,
    }
    for kind, wanted in expected.items():
        torch.testing.assert_close(projection(moment, kind, 0.9), wanted, rtol=0, atol=1e-9)


def scans_and_outputs(model: nn.Module, x: Tensor) -> tuple[list[ScanInputs], list[Tensor]]:
    """Inputs of every scan, directions of a layer one after the other, and of every output projection."""
    scans: list[ScanInputs] = []
    outputs: list[Tensor] = []
    for block in model.layers:
        block.mixer.scan_hook = scans.append
        block.mixer.out_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    model(x)
    return scans, outputs


def test_moments_are_those_of_what_each_matrix_is_multiplied_with() -> None:
    method = method_after_task_0()
    model = copy.deepcopy(method.module).eval()
    found = method.base.moments
    x = torch.cat([batch.x for batch in toys.loader(TASKS[0])])
    with torch.no_grad():
        scans, outputs = scans_and_outputs(model, x)
    names = [f"layers.{layer}.mixer.{name}" for layer in range(2) for name in ("x_proj", "x_proj_b")]
    assert len(found) == 3 * 4 + 2
    for name, scan in zip(names, scans, strict=True):
        u, delta = scan.u, nn.functional.softplus(scan.delta + scan.delta_bias)
        tokens, width = u.shape[1], u.shape[2]
        expected = dict.fromkeys(("x", "delta", "delta_x"), torch.zeros(width, width, dtype=torch.float64))
        for image, steps in zip(u, delta, strict=True):
            products = sum(torch.outer(steps[t], image[t]) for t in range(tokens))
            expected["x"] = expected["x"] + sum(torch.outer(row, row) for row in image) / tokens
            expected["delta"] = expected["delta"] + sum(torch.outer(row, row) for row in steps) / tokens
            expected["delta_x"] = expected["delta_x"] + sum(torch.outer(row, row) for row in products) / width
        for part, wanted in expected.items():
            torch.testing.assert_close(found[f"{name}.{part}"], wanted, rtol=1e-9, atol=1e-12)
    for layer, y in enumerate(outputs):
        wanted = torch.einsum("btd,bte->de", y, y) / y.shape[1]
        torch.testing.assert_close(found[f"layers.{layer}.mixer.out_proj"], wanted, rtol=1e-9, atol=1e-12)


def test_padding_is_left_out() -> None:
    torch.manual_seed(0)
    model = create_model("mamba_nano", num_classes=4, in_dim=3, d_model=16, n_layer=1, d_state=4).double().eval()
    series = [torch.randn(length, 3, dtype=torch.float64) for length in (5, 3)]
    moments = []
    for rows in ([series], [[one] for one in series]):
        method = build_method(copy.deepcopy(model), "nullspace", data_kind="series")
        method.begin_task(0)
        labels = [torch.zeros(len(one), dtype=torch.int64) for one in rows]
        loader = [method.context.modality.collate(one, y) for one, y in zip(rows, labels, strict=True)]
        method.end_task(0, loader)
        moments.append(method.base.moments)
    for name, moment in moments[0].items():
        torch.testing.assert_close(moment, moments[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_every_step_is_projected_and_the_rest_is_frozen(optimizer_class: Any) -> None:
    method = method_after_task_0(eta=0.8)
    method.begin_task(TASKS[1])
    plain = copy.deepcopy(method.module)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    batch = toys.batch(TASKS[1])
    for module in (method.module, plain):
        module.train()
        optimizer = optimizer_class(module.parameters(), lr=0.1, weight_decay=0.1)
        logits = module(batch.x)[:, 2:4]
        nn.functional.cross_entropy(logits, batch.y - 2).backward()
        optimizer.step()
    method.after_step()
    moments, rank, n = method.base.moments, 1, 4
    for name, value in method.module.state_dict().items():
        step = plain.state_dict()[name] - start[name]
        prefix, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf in ("x_proj", "x_proj_b"):
            p = {part: projection(moments[f"{prefix}.{leaf}.{part}"], "projector", 0.8) for part in ("x", "delta_x")}
            parts = step.split([rank, n, n])
            step = torch.cat([parts[0] @ p["x"], parts[1] @ p["delta_x"], parts[2] @ p["x"]])
        elif leaf in ("A_log", "A_b_log"):
            scan = {"A_log": "x_proj", "A_b_log": "x_proj_b"}[leaf]
            step = projection(moments[f"{prefix}.{scan}.delta"], "projector", 0.8) @ step
        elif leaf == "out_proj":
            step = step @ projection(moments[f"{prefix}.out_proj"], "projector", 0.8)
        elif not name.startswith("head."):
            assert identical(value, start[name]), f"{name} is frozen"
            continue
        assert step.abs().max() > 0
        torch.testing.assert_close(value, start[name] + step, rtol=1e-9, atol=1e-12, msg=name)


def test_which_of_the_conditions_keep_old_outputs() -> None:
    """With η = 1 and an exact null space, steps of x_proj and out_proj leave old outputs alone, and that of A does not.

    The paper asks for ``delta U = 0``, a sum over channels, of the step U of A; the scan takes exp(delta A) channel by
    channel, without any sum.
    """
    torch.manual_seed(0)
    model = create_model("mamba_nano", num_classes=4, in_dim=2, d_model=16, n_layer=1, d_state=4).double().eval()
    toys.nudge(model, 0.3)  # freshly initialized, the state hardly matters for the output
    old = torch.randn(1, 4, 2, dtype=torch.float64)
    method = build_method(model, "nullspace", data_kind="series", eta=1.0)
    method.begin_task(0)
    method.end_task(0, [method.context.modality.collate(list(old), torch.zeros(1, dtype=torch.int64))])
    for name, moment in method.base.moments.items():
        # Rows of the products Σ delta xᵀ are sums of rows x: of one short sequence they span the same space.
        values, vectors = torch.linalg.eigh(method.base.moments[name.replace("delta_x", "x")])
        null = vectors[:, values < 1e-12 * values[-1]]
        assert len(moment) - 4 <= null.shape[1] < len(moment), "4 tokens span 4 dimensions at most"
        assert (moment @ null).abs().max() < 1e-9 * moment.abs().max()
        method.base.projections[name] = null @ null.T
    method.begin_task(1)
    new = torch.randn(3, 9, 2, dtype=torch.float64)
    before = model(old), model(new)

    def step(*names: str) -> None:
        """Any step of any optimizer, projected."""
        for name in names:
            parameter = model.get_parameter(f"{method.base.directions[0].name.removesuffix('.x_proj')}.{name}")
            (parameter * torch.zeros_like(parameter)).sum().backward()  # a gradient arrives
            parameter.data += 0.5 * torch.randn_like(parameter)
        method.after_step()

    step("x_proj.weight", "out_proj.weight")
    torch.testing.assert_close(model(old), before[0], rtol=1e-9, atol=1e-10)
    assert (model(new) - before[1]).abs().max() > 1e-4
    step("A_log")
    assert (model(old) - before[0]).abs().max() > 1e-6


def test_moments_of_tasks_add_up() -> None:
    method = method_after_task_0()
    first = dict(method.base.moments)
    method.begin_task(TASKS[1])
    method.end_task(TASKS[1], toys.loader(TASKS[1]))
    other = build_method(toys.vim(), "nullspace")
    other.begin_task(0)
    other.end_task(0, toys.loader(TASKS[1]))
    for name, moment in method.base.moments.items():
        torch.testing.assert_close(moment, first[name] + other.base.moments[name], rtol=1e-10, atol=1e-14)


def test_other_layers_missing_moments_and_bad_options_are_refused() -> None:
    for name in ("mamba2_nano", "s4d_nano", "vmamba_nano"):
        with pytest.raises(ConfigError, match="of another kind or has adapters"):
            build_method(toys.model(name), "nullspace")
    with pytest.raises(ConfigError, match="has no features of earlier tasks"):
        build_method(toys.vim(), "nullspace").begin_task(TASKS[1])
    method = build_method(toys.vim(), "nullspace")
    method.begin_task(TASKS[0])
    with pytest.raises(ConfigError, match="gave no sample"):
        method.end_task(TASKS[0], [])
    for options in ({"eta": 1.5}, {"projection": "none"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            build_method(toys.vim(), "nullspace", **options)
    other = build_method(toys.vim(depth=1), "nullspace")
    with pytest.raises(ConfigError, match="belong to another model"):
        other.load_state_dict(method_after_task_0().state_dict())
