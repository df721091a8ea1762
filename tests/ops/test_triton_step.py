"""A training step with every operation in Triton against the same step on the CPU."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import infssm
from tests.ops.cases import assert_near
from tests.ops.test_triton import DEVICE, needs_triton

pytestmark = needs_triton

MODELS = {
    "vim_nano": ({"img_size": 8, "patch_size": 4, "in_chans": 1, "depth": 1, "embed_dim": 8}, (2, 1, 8, 8), "output"),
    "mamba2_nano": ({"d_model": 16, "n_layer": 1, "d_state": 4, "headdim": 8, "in_dim": 3}, (2, 5, 3), "aligned"),
}


def step(name: str, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    options, shape, kind = MODELS[name]
    torch.manual_seed(0)
    model, old = (infssm.create_model(name, num_classes=4, **options).to(device) for _ in range(2))
    x = torch.randn(shape).to(device)
    with infssm.record_states(model) as new_states:
        loss = F.cross_entropy(model(x), torch.tensor([0, 1], device=device))
    with torch.no_grad(), infssm.record_states(old) as old_states:
        old(x)
    for layer, spaces in new_states.items():
        for past, now in zip(old_states[layer], spaces, strict=True):
            loss = loss + infssm.distance(past, now, kind=kind, soft_normalize=True, validate=False).mean()
    loss.backward()
    return loss.detach().cpu(), {key: p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_that_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, gradients = step(name, "cpu")
    served = []
    if DEVICE == "cpu":
        for name_of in ("conv", "distance", "norm", "scan", "ssd", "states"):
            module = import_module(f"infssm.ops.{name_of}")
            monkeypatch.setattr(module, "choose", lambda *_, by=name_of, **__: served.append(by) or "triton")
        for model in ("mamba", "mamba2"):
            monkeypatch.setattr(f"infssm.models.{model}.can_fuse", lambda _: False)
    loss, actual = step(name, DEVICE)
    recurrence = "ssd" if name == "mamba2_nano" else "scan"
    assert set(served) >= {"conv", "distance", "norm", recurrence} or DEVICE == "cuda"
    assert_near(loss, expected, 1e-5, "loss")
    assert actual.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert_near(actual[key], gradient, 1e-4, key)
