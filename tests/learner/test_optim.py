from __future__ import annotations

import torch
from torch import nn

from infssm.learner.optim import build_optimizer, decay_groups, set_learning_rate
from infssm.models import create_model


def names(model: nn.Module) -> dict[str, set[str]]:
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: {by_id[id(p)] for p in group["params"]} for group in decay_groups(model, 0.1)}


def test_groups_of_vim_follow_timms_rule() -> None:
    model = create_model("vim_nano", num_classes=4, depth=1, embed_dim=16, d_state=4)
    groups = names(model)
    assert groups["decay"] | groups["no_decay"] == {name for name, _ in model.named_parameters()}
    assert not groups["decay"] & groups["no_decay"]
    a_logs = {n for n in groups["decay"] if n.endswith(("A_log", "A_b_log"))}
    assert len(a_logs) == 2
    assert {"pos_embed", "cls_token"} <= groups["no_decay"]
    assert {n for n in groups["no_decay"] if n.endswith((".D", ".D_b"))}
    assert "head.weight" in groups["decay"]
    for name, parameter in model.named_parameters():
        free = parameter.ndim <= 1 or name.endswith(".bias") or name in ("pos_embed", "cls_token")
        assert (name in groups["no_decay"]) == free, name


def test_exemptions_of_wrapped_models_hold() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = create_model("vim_nano", num_classes=4, depth=1, embed_dim=16, d_state=4)

    assert {"backbone.pos_embed", "backbone.cls_token"} <= names(Wrapper())["no_decay"]


def test_frozen_parameters_are_left_out() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    groups = decay_groups(layer, 0.1)
    assert [group["name"] for group in groups] == ["decay"]


def test_adamw_step_is_the_textbooks() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, dtype=torch.float64)
    optimizer = build_optimizer(decay_groups(layer, 0.1))
    set_learning_rate(optimizer, 0.01)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in layer.named_parameters()}
    for step in (1, 2, 3):
        layer(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
        for name, p in layer.named_parameters():
            m, v = moments[name]
            assert p.grad is not None
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.999).add_(0.001 * p.grad**2)
            decay = 0.1 if name == "weight" else 0.0
            before[name] *= 1 - 0.01 * decay
            before[name] -= 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=1e-12, atol=1e-14)


def test_group_rate_scale() -> None:
    layer = nn.Linear(2, 2)
    optimizer = build_optimizer([{"params": [layer.weight]}, {"params": [layer.bias], "lr_scale": 0.1}])
    set_learning_rate(optimizer, 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
