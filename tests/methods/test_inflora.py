"""`inflora` against its equations, written out in numpy, and its pairs against a model with two factors."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infssm.errors import ConfigError
from infssm.methods import Method, attach, build_method
from infssm.methods.bases.inflora import Subspace, protect
from tests.compare import identical
from tests.methods import toys
from tests.methods.toys import TASKS


def moment(width: int, seed: int, decay: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, width, dtype=torch.float64, generator=generator)
    rows = (
        rows
        * torch.exp(-decay * torch.arange(width))
        @ torch.randn(width, width, dtype=torch.float64, generator=generator)
    )
    return rows.T @ rows / len(rows)


class Memory:
    """DualGPM with projectors onto what is protected: which of two bases is stored makes no difference to them."""

    def __init__(self, width: int) -> None:
        self.protected = np.zeros((width, width))
        self.rank, self.dual = 0, False

    def add(self, moment: np.ndarray[Any, Any], share: float) -> None:
        width, total = len(moment), (np.linalg.svd(moment)[1] ** 2).sum()
        u, s, _ = np.linalg.svd(moment - self.protected @ moment)
        ratio, count = s**2 / total, 0
        if self.rank == 0:
            while ratio[: count + 1].sum() < share:
                count += 1
            count = max(count, 1)
        elif not self.dual:
            held = (total - (s**2).sum()) / total
            while count < width and held < share:
                held += ratio[count]
                count += 1
        else:
            left = (s**2).sum() / total
            while count < width and left >= 1 - share:
                left -= ratio[count]
                count += 1
        self.protected += u[:, :count] @ u[:, :count].T
        self.rank += count
        self.dual = self.dual or self.rank > width / 2


def projector(space: Subspace) -> Tensor:
    inside = space.basis @ space.basis.T
    return torch.eye(len(inside), dtype=torch.float64) - inside if space.complement else inside


@pytest.mark.parametrize("decay", [0.05, 0.3, 1.0])
def test_the_protected_subspace_is_that_of_dual_gpm(decay: float) -> None:
    space, reference, kinds = None, Memory(12), set()
    for task in range(5):
        found, share = moment(12, task, decay), 0.9 + 0.02 * task
        space = protect(space, found, share)
        reference.add(found.numpy(), share)
        kinds.add(space.complement)
        torch.testing.assert_close(projector(space), torch.from_numpy(reference.protected), rtol=0, atol=1e-9)
        assert space.basis.shape[1] <= 6
    assert kinds == ({False} if decay == 1.0 else {False, True})


def inputs(model: nn.Module, name: str, task: toys.Task) -> Tensor:
    """Rows that a layer is given on a task's images."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in toys.loader(task):
            model(batch.x)
    handle.remove()
    return torch.cat(seen).flatten(0, 1)


def after_task_0(**options: Any) -> Method:
    method = build_method(toys.vim(), "inflora", num_tasks=3, rank=3, **options)
    method.begin_task(TASKS[0], toys.loader(TASKS[0]))
    method.end_task(TASKS[0], toys.loader(TASKS[0]))
    return method


def optimizer_of(method: Method) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in method.module.parameters() if p.requires_grad]}]
    return torch.optim.Adam(method.param_groups(groups), lr=0.01)


def test_directions_are_the_main_ones_of_the_new_inputs_outside_those_of_the_old() -> None:
    method = after_task_0(threshold=0.9)
    model = copy.deepcopy(method.module).eval()
    method.begin_task(TASKS[1], toys.loader(TASKS[1]))
    names = {f"layers.{i}.mixer.{n}" for i in range(2) for n in ("in_proj", "x_proj", "x_proj_b")}
    assert set(method.base.adapters.pairs) == names
    for name, pair in method.base.adapters.pairs.items():
        old, new = (inputs(model, name, task).numpy() for task in TASKS[:2])
        memory = Memory(old.shape[1])
        memory.add(old.T @ old / len(old), 0.9)
        h = new.T @ new / len(new)
        expected = np.linalg.svd(h - memory.protected @ h)[0][:, :3]
        assert pair.A is not None
        found = 3 * pair.A.T @ pair.A
        torch.testing.assert_close(found, torch.from_numpy(expected @ expected.T), rtol=0, atol=1e-8)
        torch.testing.assert_close(pair.A @ pair.A.T, torch.eye(3, dtype=torch.float64) / 3, rtol=0, atol=1e-12)


def test_steps_are_those_of_a_model_with_two_factors() -> None:
    method = after_task_0()
    method.begin_task(TASKS[1], toys.loader(TASKS[1]))
    pairs = method.base.adapters.pairs
    plain = copy.deepcopy(method.module)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    factors = {name: (torch.zeros_like(pair.B, requires_grad=True), pair.A) for name, pair in pairs.items()}
    head = [plain.head.weight, plain.head.bias]
    reference = torch.optim.Adam([{"params": [b for b, _ in factors.values()]}, {"params": head}], lr=0.01)
    optimizer = optimizer_of(method)
    for seed in range(3):
        batch = toys.batch(TASKS[1], seed=seed)
        weights = {f"{name}.weight": start[f"{name}.weight"] + b @ a for name, (b, a) in factors.items()}
        logits = torch.func.functional_call(plain, weights, batch.x)[:, 2:4]
        expected = nn.functional.cross_entropy(logits, batch.y - 2)
        found = toys.total(method.loss(batch))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        for loss, one in ((expected, reference), (found, optimizer)):
            loss.backward()
            one.step()
            one.zero_grad()
        method.after_step()
    for name, value in method.module.state_dict().items():
        layer = name.removesuffix(".weight")
        wanted = start[name]
        if layer in factors:
            b, a = factors[layer]
            wanted = wanted + (b @ a).detach()
            assert (value - start[name]).abs().max() > 1e-4
        elif name.startswith("head."):
            wanted = plain.get_parameter(name).detach()
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12, msg=name)
        if layer not in factors and not name.startswith("head."):
            assert identical(value, start[name])


@pytest.mark.parametrize("name", ["inflora", "frozen"])
def test_the_first_session_can_train_pairs_alone(name: str) -> None:
    method = build_method(toys.vim(), name, first_session="lora", rank=2)
    start = copy.deepcopy(method.module.state_dict())
    method.begin_task(TASKS[0], toys.loader(TASKS[0]))
    optimizer = optimizer_of(method)
    for batch in toys.loader(TASKS[0]):
        toys.total(method.loss(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step()
    method.end_task(TASKS[0], toys.loader(TASKS[0]))
    for key, value in method.module.state_dict().items():
        step = value - start[key]
        if key.endswith(("in_proj.weight", "x_proj.weight", "x_proj_b.weight")):
            assert torch.linalg.matrix_rank(step, atol=1e-8) == 2, key
        elif not key.startswith("head."):
            assert identical(value, start[key]), key
    if name == "frozen":
        method.begin_task(TASKS[1], toys.loader(TASKS[1]))
        assert {n for n, p in method.module.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}


def test_the_threshold_grows_to_one_where_the_number_of_tasks_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    def noted(memory: Subspace | None, moment: Tensor, share: float) -> Subspace:
        shares.append(share)
        return protect(memory, moment, share)

    monkeypatch.setattr("infssm.methods.bases.inflora.protect", noted)
    method = after_task_0(threshold=0.94, targets=("in_proj",))
    method.begin_task(TASKS[1], toys.loader(TASKS[1]))
    method.end_task(TASKS[1], toys.loader(TASKS[1]))
    assert shares == pytest.approx([0.94, 0.94, 0.96, 0.96])


def test_misuse_is_explained() -> None:
    with pytest.raises(ConfigError, match="has a linear layer called nothing"):
        build_method(toys.vim(), "inflora", targets=("nothing",))
    with pytest.raises(ConfigError, match="conv1d is none"):
        build_method(toys.vim(), "inflora", targets=("conv1d",))
    with pytest.raises(ConfigError, match="has no inputs of earlier tasks"):
        build_method(toys.vim(), "inflora").begin_task(TASKS[1], toys.loader(TASKS[1]))
    with pytest.raises(ConfigError, match="chooses the directions"):
        build_method(toys.vim(), "frozen", first_session="lora").begin_task(TASKS[0])
    with pytest.raises(ConfigError, match="gave no sample"):
        build_method(toys.vim(), "inflora", first_session="lora").begin_task(TASKS[0], [])
    with pytest.raises(ConfigError, match="belong to another model"):
        build_method(toys.vim(depth=1), "inflora").load_state_dict(after_task_0().state_dict())
    model = toys.vim()
    method = attach(model, "inflora", first_session="lora")
    method.begin_task(TASKS[0], toys.loader(TASKS[0]))
    batch = toys.batch(TASKS[0])
    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
    with pytest.raises(ConfigError, match="parameters of its own"):
        method.after_step()


@pytest.mark.parametrize("name", ["mamba_nano", "mamba2_nano", "vmamba_nano"])
def test_other_models(name: str) -> None:
    method = build_method(toys.model(name), "inflora", rank=3, data_kind="tokens" if "mamba" in name[:6] else "images")
    x = toys.inputs(name)
    batches = [method.context.modality.collate(list(x), torch.tensor([0, 1, 0, 1]))] if name != "vmamba_nano" else None
    if batches is None:
        batches = [toys.Batch(x=x, y=torch.tensor([0, 1, 0, 1]))]
    method.begin_task(0, batches)
    method.end_task(0, batches)
    method.begin_task(1, batches)
    assert math.isfinite(float(sum(pair.A.sum() for pair in method.base.adapters.pairs.values())))
