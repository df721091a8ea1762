"""What mixers emit: the right values, in the same forward, without changing its output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import infssm.ops
from infssm.errors import ConfigError
from infssm.models import STATE_SETS, Mamba2Mixer, MambaMixer, S4DMixer, VimMixer
from infssm.models import vmamba as vmamba_module
from tests.models.small import KINDS, SMALL, Stopped, Tap, mixers, scramble


def record(name: str, **tap_options: bool):
    """Run a scrambled small model with a tap in every mixer; also catch each mixer's input."""
    small = SMALL[name]
    model = small.build(name)
    scramble(model)
    x = small.make_input()
    plain = model(x)
    tap = Tap(**tap_options)
    inputs: dict[int, Tensor] = {}
    handles = []
    for mixer in mixers(model):
        mixer.tap = tap
        handles.append(mixer.register_forward_pre_hook(lambda m, args: inputs.__setitem__(id(m), args[0])))
    recorded = model(x)
    for handle in handles:
        handle.remove()
    return model, plain, recorded, tap, inputs


def loop_means(delta: Tensor, a: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Channel by channel: mean exp(delta A), mean delta, mean (exp(delta A) - 1) / A, in float64."""
    sums = [0.0, 0.0, 0.0]
    for channel in range(a.shape[0]):
        step = delta[..., channel].double() + (0 if bias is None else bias[channel].double())
        step = torch.log1p(torch.exp(step))[..., None]
        transition = torch.exp(step * a[channel].double())
        sums[0] = sums[0] + transition
        sums[1] = sums[1] + step[..., 0]
        sums[2] = sums[2] + (transition - 1) / a[channel].double()
    return tuple(value / a.shape[0] for value in sums)


def conv_silu(x: Tensor, weight: Tensor, bias: Tensor, *, flip: bool) -> Tensor:
    """Depthwise causal convolution over tokens [batch, tokens, channels], on the flipped sequence if asked."""
    x = (x.flip(1) if flip else x).transpose(1, 2)
    width = weight.shape[-1]
    y = F.silu(F.conv1d(F.pad(x, (width - 1, 0)), weight, bias, groups=weight.shape[0])).transpose(1, 2)
    return y.flip(1) if flip else y


def expected_states(mixer, hidden: Tensor, include_dt_bias: bool):
    """(a, delta, zoh, b, c) per direction, written from the equations."""
    if isinstance(mixer, (VimMixer, MambaMixer)):
        x = (hidden @ mixer.in_proj.weight.T)[..., : mixer.d_inner]
        sides = [("", "A_log", False)] + ([("_b", "A_b_log", True)] if isinstance(mixer, VimMixer) else [])
        for suffix, a_log, flip in sides:
            conv, dt = getattr(mixer, f"conv1d{suffix}"), getattr(mixer, f"dt_proj{suffix}")
            u = conv_silu(x, conv.weight, conv.bias, flip=flip)
            low, b, c = (u @ getattr(mixer, f"x_proj{suffix}").weight.T).split(
                [mixer.dt_rank, mixer.d_state, mixer.d_state], -1
            )
            bias = dt.bias if include_dt_bias else None
            yield (*loop_means(low @ dt.weight.T, -getattr(mixer, a_log).exp(), bias), b, c)
    elif isinstance(mixer, Mamba2Mixer):
        inner, width = mixer.d_inner, mixer.ngroups * mixer.d_state
        projected = hidden @ mixer.in_proj.weight.T
        xbc = conv_silu(projected[..., inner : -mixer.nheads], mixer.conv1d.weight, mixer.conv1d.bias, flip=False)
        b, c = xbc[..., inner : inner + width], xbc[..., inner + width :]
        dt, a, bias = projected[..., -mixer.nheads :], -mixer.A_log.exp()[:, None], mixer.dt_bias
        heads = mixer.nheads // mixer.ngroups
        groups = [
            loop_means(dt[..., i : i + heads], a[i : i + heads], bias[i : i + heads] if include_dt_bias else None)
            for i in range(0, mixer.nheads, heads)
        ]
        if mixer.ngroups == 1:
            yield (*groups[0], b, c)
        else:
            grouped = (*b.shape[:-1], mixer.ngroups, mixer.d_state)
            yield (*(torch.stack(g, dim=2) for g in zip(*groups, strict=True)), b.reshape(grouped), c.reshape(grouped))
    elif isinstance(mixer, S4DMixer):
        kernel = mixer.kernel
        dt = kernel.log_dt.exp()
        a = (-kernel.log_A_real.exp() + 1j * kernel.A_imag) * dt[:, None]
        if kernel.discretization == "zoh":
            bar, factor = a.exp(), (a.exp() - 1) / a * dt[:, None]
        else:
            bar, factor = (1 + a / 2) / (1 - a / 2), dt[:, None] / (1 - a / 2)
        c = kernel.C[..., 0] + 1j * kernel.C[..., 1]
        yield tuple(t[None] for t in (bar, dt, factor, torch.ones_like(bar), c))
    else:
        yield from expected_ss2d(mixer, hidden, include_dt_bias)


def expected_ss2d(mixer, hidden: Tensor, include_dt_bias: bool):
    x = F.conv2d(
        (hidden @ mixer.in_proj.weight.T).permute(0, 3, 1, 2), mixer.conv2d.weight, padding=1, groups=mixer.d_inner
    )
    x = F.silu(x)
    inner = mixer.d_inner
    for k in range(4):
        path = (x if k % 2 == 0 else x.transpose(2, 3)).flatten(2).transpose(1, 2)
        rows = mixer.dt_rank + 2 * mixer.d_state
        weight = mixer.x_proj.weight[k * rows : (k + 1) * rows]
        low, b, c = (path @ weight.T).split([mixer.dt_rank, mixer.d_state, mixer.d_state], -1)
        delta = low @ mixer.dt_projs.weight[k * inner : (k + 1) * inner].T
        a = -mixer.A_logs[k * inner : (k + 1) * inner].exp()
        yield (*loop_means(delta, a, mixer.dt_projs_bias[k] if include_dt_bias else None), b, c)


@pytest.mark.parametrize("include_dt_bias", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_emitted_states_equal_an_explicit_loop_over_channels(name: str, include_dt_bias: bool):
    model, plain, recorded, tap, inputs = record(name, zoh=True, include_dt_bias=include_dt_bias)
    torch.testing.assert_close(recorded, plain, rtol=0, atol=1e-6)
    assert [m for m, _ in tap.emitted] == mixers(model)
    for mixer, directions in tap.emitted:
        expected = list(expected_states(mixer, inputs[id(mixer)], include_dt_bias))
        assert len(directions) == len(expected)
        for states, (a, delta, zoh, b, c) in zip(directions, expected, strict=True):
            for value, reference in ((states.a, a), (states.delta, delta), (states.zoh, zoh)):
                dtype = torch.complex128 if reference.is_complex() else torch.float64
                assert value.shape == reference.shape
                torch.testing.assert_close(value.to(dtype), reference.to(dtype), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(states.b, b, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(states.c, c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_dt_bias_matters_and_zoh_only_on_request(name: str):
    _, _, _, with_bias, _ = record(name)
    torch.manual_seed(0)
    _, _, _, first, _ = record(name)
    torch.manual_seed(0)
    _, _, _, without, _ = record(name, include_dt_bias=False)
    assert all(states.zoh is None for _, directions in with_bias.emitted for states in directions)
    if not name.startswith("s4d"):
        a, b = first.emitted[0][1][0], without.emitted[0][1][0]
        assert (a.a - b.a).abs().max() > 0.05
        torch.testing.assert_close(a.c, b.c)


@pytest.mark.parametrize("name", KINDS)
def test_stopping_computes_states_without_any_scan(name: str, monkeypatch):
    small = SMALL[name]
    model, x = small.build(name), small.make_input()
    scramble(model)
    last = mixers(model)[-1]
    reference, stopping = Tap(), Tap(stop=True)
    last.tap = reference
    model(x)
    last.tap = stopping
    scans: list[object] = []
    for module, run in ((infssm.models.mixer, "scan"), (infssm.models.mamba2, "scan_ssd")):
        original = getattr(module, run)
        monkeypatch.setattr(module, run, lambda *a, _f=original, **k: scans.append(a) or _f(*a, **k))
    together = infssm.models.mamba.scan_directions  # several scans in one call
    monkeypatch.setattr(
        *(infssm.models.mamba, "scan_directions"),
        lambda xz, weights, reverse, **k: scans.extend(reverse) or together(xz, weights, reverse, **k),
    )
    whole = infssm.models.mamba2.scan_projected
    monkeypatch.setattr(infssm.models.mamba2, "scan_projected", lambda *a, **k: scans.append(a) or whole(*a, **k))
    with pytest.raises(Stopped):
        model(x)
    directions = 4 if name.startswith("vmamba") else 2 if name.startswith("vim") else 1
    assert len(scans) == (0 if name.startswith("s4d") else directions * (len(mixers(model)) - 1))
    for stopped, complete in zip(stopping.emitted[0][1], reference.emitted[0][1], strict=True):
        for value, other in zip(stopped, complete, strict=True):
            if value is not None:
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_a_stopping_tap_that_does_not_raise_is_an_error():
    small = SMALL["vim_nano"]
    model = small.build("vim_nano")
    tap = Tap(stop=True)
    tap.emit = lambda *_: None  # type: ignore[method-assign]
    mixers(model)[0].tap = tap
    with pytest.raises(RuntimeError, match="must raise"):
        model(small.make_input())


@pytest.mark.parametrize("name", KINDS)
def test_gradients_flow_from_states_to_the_parameters_that_form_them(name: str):
    model, _, _, tap, _ = record(name)
    mixer, directions = tap.emitted[0]
    total = sum(((value - 2).abs().square().sum() for s in directions for value in (s.a, s.b, s.c)), torch.zeros(()))
    total.backward()
    for parameter, rows in mixer.state_parameters("ABC-full"):
        gradient = parameter.grad if rows is None else parameter.grad[rows]
        assert gradient.abs().sum() > 0
    assert all(p.grad is None for p in mixers(model)[-1].parameters())


@pytest.mark.parametrize("name", KINDS)
def test_state_parameters_hold_all_and_only_what_forms_the_states(name: str):
    """AC-direct: changing its rows moves A or C; B alone never depends on them beyond shared rows."""
    model = SMALL[name].build(name)
    mixer = mixers(model)[0]
    own = {id(p) for p in mixer.parameters()}
    sizes = {}
    for which in STATE_SETS:
        rows = mixer.state_parameters(which)
        assert all(id(p) in own for p, _ in rows)
        sizes[which] = sum((p if r is None else p[r]).numel() for p, r in rows)
    assert sizes["AC-direct"] <= sizes["ABC-direct"] <= sizes["ABC-full"]
    if not name.startswith("s4d"):
        assert sizes["AC-direct"] < sizes["ABC-direct"]
    with pytest.raises(ConfigError, match="AC-direct"):
        mixer.state_parameters("all")


@pytest.mark.parametrize("name", ["vim_nano", "mamba_nano", "mamba2_nano", "vmamba_nano"])
def test_ac_direct_rows_determine_a_and_c_and_leave_b_alone(name: str):
    """Gradients of (A, C) with respect to the projections live in the AC rows; those of B in the remaining ones."""
    _, _, _, tap, _ = record(name)
    mixer, directions = tap.emitted[-1]
    chosen: dict[int, Tensor] = {}
    for parameter, rows in mixer.state_parameters("AC-direct"):
        mask = chosen.setdefault(id(parameter), torch.zeros(parameter.shape[0], dtype=torch.bool))
        mask[rows if rows is not None else slice(None)] = True
    weight = mixer.in_proj.weight if name == "mamba2_nano" else mixer.x_proj.weight
    mask = chosen[id(weight)]
    (of_b,) = torch.autograd.grad(sum(s.b.sum() for s in directions), weight, retain_graph=True)
    (of_c,) = torch.autograd.grad(sum(s.c.sum() + s.a.sum() for s in directions), weight)
    assert of_b[mask].abs().sum() == 0
    assert of_b[~mask].abs().sum() > 0
    assert of_c[~mask].abs().sum() == 0
    assert (of_c[mask].abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize("name", ["vim_nano", "mamba2_nano"])
def test_recording_works_under_activation_checkpointing(name: str):
    small = SMALL[name]
    model = small.build(name)
    scramble(model)
    x = small.make_input()
    plain, wrapped = Tap(), Tap()
    gradients = []
    for tap, use_checkpoint in ((plain, False), (wrapped, True)):
        model.zero_grad()
        for mixer in mixers(model):
            mixer.tap = tap
        hidden = model.embed(x)
        residual = None
        for layer in model.layers if name == "vim_nano" else model.backbone.layers:
            if use_checkpoint:
                hidden, residual = checkpoint(layer, hidden, residual, use_reentrant=False)
            else:
                hidden, residual = layer(hidden, residual)
        states = [s for _, directions in tap.emitted for s in directions]
        loss = hidden.square().mean() + sum(s.a.square().mean() + s.c.square().mean() for s in states)
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], value, rtol=1e-4, atol=1e-6)


def test_column_scans_of_vmamba_see_the_transposed_image():
    """Swapping image axes swaps row and column scans when both have the same parameters."""
    mixer = vmamba_module.SS2D(16, d_state=2)
    with torch.no_grad():
        mixer.x_proj.weight.copy_(mixer.x_proj.weight.view(4, -1, 16)[:1].expand(4, -1, -1).reshape(-1, 16))
        mixer.dt_projs.weight.copy_(mixer.dt_projs.weight.view(4, 16, -1)[:1].expand(4, -1, -1).reshape(64, -1))
        mixer.dt_projs_bias.copy_(mixer.dt_projs_bias[:1].expand(4, -1))
        mixer.conv2d.weight.copy_((mixer.conv2d.weight + mixer.conv2d.weight.transpose(2, 3)) / 2)
    x = torch.randn(2, 3, 5, 16)
    tap, swapped = Tap(), Tap()
    mixer.tap = tap
    y = mixer(x)
    mixer.tap = swapped
    torch.testing.assert_close(mixer(x.transpose(1, 2)).transpose(1, 2), y, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(swapped.emitted[0][1][0].c, tap.emitted[0][1][1].c, rtol=1e-4, atol=1e-6)
