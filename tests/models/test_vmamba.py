"""VMamba against explicit loops over four directions, and against the layout of the released checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infssm.errors import ConfigError
from infssm.models import SS2D, create_model
from tests.compare import identical
from tests.models.small import SMALL, scramble


def paths(height: int, width: int) -> list[list[tuple[int, int]]]:
    """The pixels in the order each direction visits them."""
    rows = [(i, j) for i in range(height) for j in range(width)]
    columns = [(i, j) for j in range(width) for i in range(height)]
    return [rows, columns, rows[::-1], columns[::-1]]


def reference_ss2d(x: Tensor, mixer: SS2D) -> Tensor:
    """Visit pixel after pixel, direction after direction; x: [batch, height, width, dim]."""
    batch, height, width, _ = x.shape
    inner, n, rank = mixer.d_inner, mixer.d_state, mixer.dt_rank
    x = (x @ mixer.in_proj.weight.T).permute(0, 3, 1, 2)
    u = F.silu(F.conv2d(x, mixer.conv2d.weight, padding=1, groups=inner))
    total = torch.zeros(batch, inner, height, width, dtype=x.dtype)
    for k, path in enumerate(paths(height, width)):
        a = -mixer.A_logs[k * inner : (k + 1) * inner].exp()
        d = mixer.Ds[k * inner : (k + 1) * inner]
        x_proj = mixer.x_proj.weight.view(4, -1, inner)[k]
        dt_proj = mixer.dt_projs.weight.view(4, inner, rank)[k]
        state = torch.zeros(batch, inner, n, dtype=x.dtype)
        pieces = torch.zeros_like(total)
        for i, j in path:
            pixel = u[:, :, i, j]
            low, b, c = (pixel @ x_proj.T).split([rank, n, n], dim=-1)
            step = F.softplus(low @ dt_proj.T + mixer.dt_projs_bias[k])[..., None]
            state = torch.exp(step * a) * state + step * b[:, None] * pixel[..., None]
            pieces[:, :, i, j] = (state * c[:, None]).sum(-1) + d * pixel
        total = total + pieces
    normed = F.layer_norm(total.permute(0, 2, 3, 1), (inner,), mixer.out_norm.weight, mixer.out_norm.bias)
    return normed @ mixer.out_proj.weight.T


@pytest.mark.parametrize(("d_state", "ratio"), [(1, 1.0), (4, 2.0)])
def test_mixer_equals_an_explicit_four_direction_loop(d_state: int, ratio: float):
    mixer = SS2D(16, d_state=d_state, ssm_ratio=ratio)
    scramble(mixer)
    x = torch.randn(2, 3, 4, 16, requires_grad=True)
    y = mixer(x)
    weight = torch.randn_like(y)
    ours = torch.autograd.grad((y * weight).sum(), [x, *mixer.parameters()])
    expected = reference_ss2d(x, mixer)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    theirs = torch.autograd.grad((expected * weight).sum(), [x, *mixer.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 1e-3 * other.norm()


def test_model_is_stem_stages_norm_mean_head():
    small = SMALL["vmamba_nano"]
    model = small.build("vmamba_nano")
    scramble(model, 0.05)
    x = torch.randn(2, 3, 32, 64)
    grid = x
    for i, layer in enumerate(model.stem):
        grid = F.conv2d(grid, layer.conv.weight, layer.conv.bias, stride=2, padding=1).permute(0, 2, 3, 1)
        grid = F.layer_norm(grid, grid.shape[-1:], layer.norm.weight, layer.norm.bias).permute(0, 3, 1, 2)
        grid = F.gelu(grid) if i == 0 else grid
    grid = grid.permute(0, 2, 3, 1)
    for i, stage in enumerate(model.layers):
        for block in stage.blocks:
            grid = grid + block.op(block.norm(grid))
            grid = grid + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(grid))))
        if i == 0:
            down = stage.downsample
            grid = F.conv2d(grid.permute(0, 3, 1, 2), down.conv.weight, down.conv.bias, stride=2, padding=1)
            grid = down.norm(grid.permute(0, 2, 3, 1))
    pooled = model.norm(grid).mean(dim=(1, 2))
    torch.testing.assert_close(model(x), model.head(pooled), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="square"):
        model.encode(model.embed(x))


@pytest.mark.parametrize(("name", "millions"), [("vmamba_tiny", 30), ("vmamba_small", 50), ("vmamba_base", 89)])
def test_published_parameter_counts(name: str, millions: int):
    with torch.device("meta"):
        model = create_model(name)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def released_layout(*, stacked: bool) -> dict[str, tuple[int, ...]]:
    """vssm1_tiny_0230s, stages cut to one block each; ``stacked``: projections as the later code names them."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.0.weight": (48, 3, 3, 3), "patch_embed.0.bias": (48,), "patch_embed.2.weight": (48,),
        "patch_embed.2.bias": (48,), "patch_embed.5.weight": (96, 48, 3, 3), "patch_embed.5.bias": (96,),
        "patch_embed.7.weight": (96,), "patch_embed.7.bias": (96,), "classifier.norm.weight": (192,),
        "classifier.norm.bias": (192,), "classifier.head.weight": (1000, 192), "classifier.head.bias": (1000,),
        "layers.0.downsample.1.weight": (192, 96, 3, 3), "layers.0.downsample.1.bias": (192,),
        "layers.0.downsample.3.weight": (192,), "layers.0.downsample.3.bias": (192,),
    }  # fmt: skip
    for i, (dim, rank) in enumerate([(96, 6), (192, 12)]):
        rows = rank + 2
        block = {
            "norm.weight": (dim,), "norm.bias": (dim,), "norm2.weight": (dim,), "norm2.bias": (dim,),
            "mlp.fc1.weight": (4 * dim, dim), "mlp.fc1.bias": (4 * dim,), "mlp.fc2.weight": (dim, 4 * dim),
            "mlp.fc2.bias": (dim,), "op.A_logs": (4 * dim, 1), "op.Ds": (4 * dim,), "op.dt_projs_bias": (4, dim),
            "op.in_proj.weight": (dim, dim), "op.conv2d.weight": (dim, 1, 3, 3), "op.out_norm.weight": (dim,),
            "op.out_norm.bias": (dim,), "op.out_proj.weight": (dim, dim),
        } | (
            {"op.x_proj.weight": (4 * rows, dim), "op.dt_projs.weight": (4 * dim, rank)}
            if stacked
            else {"op.x_proj_weight": (4, rows, dim), "op.dt_projs_weight": (4, dim, rank)}
        )  # fmt: skip
        shapes |= {f"layers.{i}.blocks.0.{key}": shape for key, shape in block.items()}
    return shapes


@pytest.mark.parametrize("stacked", [True, False])
def test_a_checkpoint_in_the_released_layout_loads_strictly(tmp_path, stacked: bool):
    state = {name: torch.randn(shape) for name, shape in released_layout(stacked=stacked).items()}
    torch.save({"model": state}, tmp_path / "vssm.pth")
    model = create_model("vmamba_tiny", depths=(1, 1), weights=tmp_path / "vssm.pth")
    assert len(model.state_dict()) == len(state)
    op = model.layers[1].blocks[0].op
    x_proj = state["layers.1.blocks.0.op.x_proj" + (".weight" if stacked else "_weight")]
    assert identical(op.x_proj.weight, x_proj.reshape(op.x_proj.weight.shape))
    assert identical(model.head.weight, state["classifier.head.weight"])
    assert identical(model.stem[1].norm.bias, state["patch_embed.7.bias"])
    assert identical(model.layers[0].downsample.norm.weight, state["layers.0.downsample.3.weight"])
