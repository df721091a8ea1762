"""Compression: pruning a state that does nothing changes nothing, refits help, results are plain models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infssm
from infssm.errors import ConfigError
from infssm.learner.export import export_model
from infssm.models import from_pretrained
from infssm.ops import ScanInputs
from infssm.ssm import calibration, find_mixers
from infssm.ssm.hidden import hidden_states

VIM = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "d_state": 6, "num_classes": 3}
MODELS = {
    "vim": ("vim_nano", VIM, lambda: torch.randn(4, 3, 16, 16)),
    "mamba": (
        "mamba_lm_nano", {"d_model": 16, "n_layer": 2, "d_state": 6, "vocab_size": 11},
        lambda: torch.randint(11, (3, 12)),
    ),
    "mamba2": (
        "mamba2_lm_nano", {"d_model": 32, "n_layer": 2, "d_state": 6, "headdim": 16, "ngroups": 2, "vocab_size": 11},
        lambda: torch.randint(11, (3, 12)),
    ),
    "s4d": ("s4d_nano", {"d_model": 8, "n_layer": 2, "d_state": 6, "in_dim": 2}, lambda: torch.randn(3, 20, 2)),
}  # fmt: skip


def make(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, options, data = MODELS[name]
    built = infssm.create_model(model, **options).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return built, data()


def silence(model: torch.nn.Module, keep: list[int]) -> None:
    """Take all but some states out of the output: rows of C are 0 (S4D: its coefficients)."""
    with torch.no_grad():
        for mixer in find_mixers(model).values():
            n = getattr(mixer, "d_state", 3)
            rest = [i for i in range(n) if i not in keep]
            if hasattr(mixer, "kernel"):
                mixer.kernel.C[:, rest] = 0
            elif hasattr(mixer, "ngroups"):
                rows = torch.tensor([g * n + i for g in range(mixer.ngroups) for i in rest])
                start = 2 * mixer.d_inner + mixer.ngroups * n
                mixer.in_proj.weight[start + rows] = 0
                mixer.conv1d.bias[mixer.d_inner + mixer.ngroups * n + rows] = 0
            else:
                for layer in (mixer.x_proj, *([mixer.x_proj_b] if hasattr(mixer, "x_proj_b") else [])):
                    layer.weight[torch.tensor(rest) + mixer.dt_rank + n] = 0


@pytest.mark.parametrize("score", ["output", "last", "magnitude"])
@pytest.mark.parametrize("name", list(MODELS))
def test_states_that_do_nothing_are_the_ones_to_go(name: str, score: str) -> None:
    model, x = make(name)
    keep = [0, 2] if name == "s4d" else [0, 3, 4]
    silence(model, keep)
    small = infssm.compress(model, states=4 if name == "s4d" else 3, data=[x], steps=0, score=score)
    with torch.no_grad():
        torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vim", "mamba", "s4d"])
def test_the_refit_is_no_worse_than_pruning_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make(name)
    first = next(iter(find_mixers(model).values()))
    seen = []
    first.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(x)
    small = infssm.compress(model, share=0.67 if name == "s4d" else 0.5, data=[x], steps=0)
    inner = seen[0]
    if name == "s4d":
        monkeypatch.setattr(torch.linalg, "solve", lambda a, b: torch.full_like(b, torch.nan))  # noqa: ARG005
    else:
        monkeypatch.setattr(calibration, "MOST_UNKNOWNS", 1)
    plain = infssm.compress(model, share=0.67 if name == "s4d" else 0.5, data=[x], steps=0)
    with torch.no_grad():
        errors = [
            (next(iter(find_mixers(other).values()))(inner) - first(inner)).square().mean() for other in (small, plain)
        ]
    assert errors[0] < errors[1]


def test_the_refit_is_the_least_squares_solution() -> None:
    """Against the design matrix itself, which the normal equations never form."""
    torch.manual_seed(0)
    shape = {"u": (2, 7, 5), "delta": (2, 7, 5), "A": (5, 6), "B": (2, 7, 6), "C": (2, 7, 6)}
    x = ScanInputs(**{name: torch.randn(size, dtype=torch.float64) for name, size in shape.items()})
    x = x._replace(A=-x.A.exp(), delta_softplus=True)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    keep, rest = torch.tensor([0, 3]), [1, 2, 4, 5]
    refit = calibration.Refit(keep, 6)
    refit.add(x, mask)
    h, c = (part[mask] for part in (hidden_states(x), x.C))  # [tokens, channels, n], [tokens, n]
    design = torch.einsum("tdi,tj->tdij", h[..., keep], c[:, rest]).flatten(2).flatten(0, 1)
    target = (h[..., rest] * c[:, None, rest]).sum(-1).flatten()
    expected = torch.linalg.lstsq(design, target.unsqueeze(1)).solution.view(2, 4)
    torch.testing.assert_close(refit.solve(), expected, rtol=1e-4, atol=1e-4)  # the ridge is 1e-6


def test_padding_is_not_counted() -> None:
    for name in ("mamba", "mamba2"):
        model, x = make(name)
        long = torch.cat([x, torch.randint(11, (3, 8))], dim=1)
        mask = torch.arange(20).expand(3, 20) < 12
        plain, padded = (
            infssm.compress(model, states=3, data=[batch], steps=2) for batch in (x, {"x": long, "mask": mask})
        )
        for (key, was), now in zip(plain.state_dict().items(), padded.state_dict().values(), strict=True):
            torch.testing.assert_close(now, was, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", list(MODELS))
def test_training_brings_the_model_back(name: str, tmp_path: Path) -> None:
    model, x = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    errors = []
    for steps in (0, 20):
        small = infssm.compress(model, states=2, data=[(x, None)], steps=steps, rate=3e-3)
        with torch.no_grad():
            errors.append((small(x).softmax(-1) - model(x).softmax(-1)).square().mean())
    assert errors[1] < errors[0]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    small.save_pretrained(tmp_path / "small")
    loaded = from_pretrained(tmp_path / "small")
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(x), small(x))


def test_a_compressed_model_is_loaded_learns_on_and_exports(tmp_path: Path) -> None:
    """Exported as a torch program: the trace that ONNX starts from, too. test_export.py writes a Vim as ONNX."""
    torch.manual_seed(0)
    model, x = infssm.create_model("vim_nano", **VIM | {"depth": 1}), torch.randn(4, 3, 16, 16)
    infssm.compress(model, states=2, data=[x], steps=1).save_pretrained(tmp_path / "small")
    small = from_pretrained(tmp_path / "small").train()
    method, labels = infssm.attach(small, "inf-ssm-exact", weight=1.0), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.Adam(small.parameters(), lr=1e-2)
    for task in range(2):
        method.begin_task(task)
        losses = []
        for _ in range(8):
            loss = torch.nn.functional.cross_entropy(small(x), labels)
            optimizer.zero_grad()
            (loss + method.penalty(x)).backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        method.end_task(task)
        labels = labels.flip(0)
    assert export_model(small.eval(), x, tmp_path / "small.pt2", "torch") < 1e-4


@pytest.mark.parametrize("score", ["output", "last"])
def test_a_channel_whose_steps_underflow_does_not_decide(score: str) -> None:
    model, x = make("mamba")
    silence(model, [0, 3, 4])
    with torch.no_grad():
        for mixer in find_mixers(model).values():
            mixer.dt_proj.bias[0] = -200.0
    small = infssm.compress(model, states=3, data=[x], steps=0, score=score)
    with torch.no_grad():
        torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-4)


def test_refusals() -> None:
    model, x = make("mamba")
    for options, message in (
        ({}, "give states or share"),
        ({"states": 2, "share": 0.5}, "give states or share"),
        ({"states": 6}, "6 of 6 states; give a number from 1 to 5"),
        ({"share": 0.0}, "0 of 6 states"),
        ({"states": 2, "steps": -1}, "give 0 or more"),
        ({"states": 2, "score": "size"}, "choose 'output', 'last' or 'magnitude'"),
    ):
        with pytest.raises(ConfigError, match=message):
            infssm.compress(model, data=[x], **options)
    with pytest.raises(ConfigError, match="data has no batch"):
        infssm.compress(model, data=[], states=2)
    with pytest.raises(ConfigError, match="must be even"):
        infssm.compress(make("s4d")[0], data=[x], states=3)
    with pytest.raises(ConfigError, match=r"not built by infssm.create_model"):
        infssm.compress(torch.nn.Linear(2, 2), data=[x], states=3)
