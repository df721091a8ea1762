"""All directions of a selective layer in one call, against the same operations one by one in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infssm
from infssm.models import create_model
from infssm.models.vim import VimMixer
from infssm.ops import causal_conv1d, selective_scan
from infssm.ops.backend import NATIVE, can_fuse
from infssm.ops.directions import DirectionWeights, scan_directions

# Tokens around the convolution's width and the scan's chunk; channels that fill no vector, one block and several.
SHAPES = [(2, 1, 20, 3, 4), (3, 3, 16, 2, 1), (2, 17, 24, 4, 16), (1, 70, 256, 5, 16), (2, 30, 130, 3, 5)]


def problem(batch: int, tokens: int, channels: int, rank: int, n: int) -> tuple[Tensor, list[DirectionWeights]]:
    torch.manual_seed(0)

    def way() -> DirectionWeights:
        tensors = (
            *(
                torch.randn(channels, 1, 4) / 2,
                torch.randn(channels),
                torch.randn(rank + 2 * n, channels) / channels**0.5,
            ),
            *(torch.randn(channels, rank), torch.randn(channels) - 2, torch.rand(channels, n), torch.randn(channels)),
        )
        return DirectionWeights(*(tensor.requires_grad_() for tensor in tensors))

    return torch.randn(batch, tokens, 2 * channels, requires_grad=True), [way(), way()]


def one_by_one(xz: Tensor, ways: list[DirectionWeights], reverse: list[bool], scale: float) -> list[Tensor]:
    """y, then a, delta, b, c of each direction, by the reference in the tensors' own precision."""
    x, z = xz.chunk(2, dim=-1)
    y, states = 0, []
    for way, back in zip(ways, reverse, strict=True):
        n = way.A_log.shape[1]
        conv, options = way.conv.squeeze(1), {"reverse": back, "backend": "reference"}
        u = causal_conv1d(x, conv, way.conv_bias, **options)
        low, b, c = F.linear(u, way.x_proj).split([way.dt_proj.shape[1], n, n], dim=-1)
        args = (u, F.linear(low, way.dt_proj), -way.A_log.exp(), b, c, way.D, z, way.dt_bias, True)
        part, means = selective_scan(*args, return_states=True, **options)
        y = y + scale * part
        states += [means.a, means.delta, b, c]
    return [y, *states]


def joined(ways: list[DirectionWeights]) -> list[Tensor]:
    return [tensor for way in ways for tensor in way]


def in_one_call(xz: Tensor, ways: list[DirectionWeights], reverse: list[bool], scale: float) -> list[Tensor]:
    y, states = scan_directions(xz, joined(ways), reverse, scale=scale, states=True)
    return [y, *(tensor for s in states for tensor in (s.a, s.delta, s.b, s.c))]


def close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5 * exact.abs().max().clamp_min(1).item())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reverse", [[False], [False, True]])
def test_values_and_gradients_are_those_of_the_single_operations(shape, reverse):
    xz, ways = problem(*shape)
    ways = ways[: len(reverse)]
    wide = [DirectionWeights(*(t.detach().double().requires_grad_() for t in way)) for way in ways]
    wide_xz = xz.detach().double().requires_grad_()
    assert can_fuse([xz, *joined(ways)]) == (NATIVE is not None)
    if NATIVE is None:
        return
    found, exact = in_one_call(xz, ways, reverse, 0.5), one_by_one(wide_xz, wide, reverse, 0.5)
    for f, e in zip(found, exact, strict=True):
        close(f, e)
    grads = [torch.randn_like(e) for e in exact]
    inputs, wide_inputs = [xz, *(t for w in ways for t in w)], [wide_xz, *(t for w in wide for t in w)]
    got = torch.autograd.grad(found, inputs, [g.float() for g in grads])
    want = torch.autograd.grad(exact, wide_inputs, grads)
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_a_part_of_the_outputs_or_of_the_weights_is_enough():
    xz, ways = problem(2, 17, 24, 4, 16)
    if NATIVE is None:  # then nothing calls it
        return
    reverse = [False, True]
    y, states = scan_directions(xz, joined(ways), reverse, scale=1.0, states=False)
    assert states == []
    (only_y,) = torch.autograd.grad(y.sum(), xz)
    y, states = scan_directions(xz, joined(ways), reverse, scale=1.0, states=True)
    (same,) = torch.autograd.grad(y.sum(), xz, retain_graph=True)
    assert torch.equal(only_y, same)  # the same code path
    (of_a,) = torch.autograd.grad(states[1].a.sum(), xz)
    wide = [DirectionWeights(*(t.detach().double() for t in way)) for way in ways]
    wide_xz = xz.detach().double().requires_grad_()
    exact = one_by_one(wide_xz, wide, reverse, 1.0)[5]
    close(of_a, torch.autograd.grad(exact.sum(), wide_xz)[0])
    frozen = [DirectionWeights(*(t.detach() for t in way)) for way in ways]
    y, _ = scan_directions(xz, joined(frozen), reverse, scale=1.0, states=False)
    assert torch.equal(torch.autograd.grad(y.sum(), xz)[0], only_y)


def small_vim() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vim_nano", img_size=8, in_chans=1, patch_size=2, embed_dim=32, depth=2, num_classes=5)


def test_a_hook_or_another_layer_is_not_passed_over():
    """What people put on a projection (hooks, adapters) runs, because the operations then run one by one."""
    x = torch.randn(2, 1, 8, 8)
    model = small_vim()
    plain = model(x)
    seen = []
    mixer = next(m for m in model.modules() if isinstance(m, VimMixer))
    handle = mixer.x_proj.register_forward_hook(lambda _m, _i, out: seen.append(out))
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-5)
    assert len(seen) == 1
    handle.remove()

    class Doubled(nn.Linear):
        def forward(self, u: Tensor) -> Tensor:
            return 2 * super().forward(u)

    doubled = Doubled(mixer.x_proj.in_features, mixer.x_proj.out_features, bias=False)
    doubled.weight = nn.Parameter(mixer.x_proj.weight.detach() / 2)
    mixer.x_proj = doubled
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-5)


def test_states_and_gradients_of_a_model_are_those_of_single_operations(monkeypatch):
    x, y = torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 2])

    def run(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        with infssm.record_states(model) as states:
            loss = F.cross_entropy(model(x), y)
        spaces = [part for layer in states.values() for space in layer for part in (space.a, space.c, space.b)]
        loss = loss + sum(part.square().mean() for part in spaces)
        return spaces, list(torch.autograd.grad(loss, list(model.parameters())))

    model = small_vim()
    together = run(model)
    monkeypatch.setattr("infssm.models.mamba.can_fuse", lambda *_: False)
    apart = run(model)
    for one, other in zip((*together[0], *together[1]), (*apart[0], *apart[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
