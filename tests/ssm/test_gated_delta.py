"""The gated delta rule as two-state systems: exact, against the rule itself and against the dense system."""

import importlib
import math

import pytest
import torch
from torch import Tensor

import infssm
from infssm._torchvision import torchvision
from infssm.errors import ConfigError
from infssm.ssm import StateSpace, find_mixers, record_states, state_parameters
from infssm.ssm.probes.gated_delta import two_states

WIDTH = 16
OPTIONS = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": 24, "pad_token_id": 0,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
MODELS = {
    "qwen3_next": ("Qwen3Next", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                                 "shared_expert_intermediate_size": 8}),
    "qwen3_5": ("Qwen3_5Text", {}),
    "qwen4_exp": ("Qwen4ExpText", {}),
    "olmo_hybrid": ("OlmoHybrid", {"linear_allow_neg_eigval": True, "linear_num_key_heads": 4}),
}  # fmt: skip


def mixer_of(name: str) -> tuple[torch.nn.Module, object]:
    """A random layer of the family in float64, and its module."""
    torchvision()
    prefix, options = MODELS[name]
    config = getattr(importlib.import_module("transformers"), f"{prefix}Config")(**OPTIONS | options)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    cls = next(value for key, value in vars(module).items() if key.endswith("GatedDeltaNet"))
    torch.manual_seed(0)
    mixer = cls(config, 0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer.double(), module


def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule token by token, [batch, tokens, heads, ...], in the dtype of its inputs."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q / math.sqrt(q.shape[-1])
    memory, outputs = torch.zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1], dtype=v.dtype), []
    for t in range(q.shape[1]):
        memory = memory * g[:, t].exp()[..., None, None]
        read = (memory * k[:, t].unsqueeze(-1)).sum(-2)
        memory = memory + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * (v[:, t] - read)).unsqueeze(-2)
        outputs.append((memory * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, dim=1)


def captured(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Module, dict, StateSpace]:
    """What the layer gives the rule, and the states that were recorded beside it."""
    mixer, module = mixer_of(name)
    seen: dict = {}
    original = module.torch_chunk_gated_delta_rule

    def keep(q, k, v, **options):
        seen.update(q=q, k=k, v=v, g=options["g"], beta=options["beta"])
        out, state = original(q, k, v, **options)
        torch.testing.assert_close(out.double(), rule(q, k, v, options["g"], options["beta"]), rtol=1e-4, atol=1e-4)
        return out.to(v.dtype), state

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", keep)
    with monkeypatch.context() as patch, record_states(mixer) as states, torch.no_grad():
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # the layer would round its decay to float32
        mixer(torch.randn(2, 9, WIDTH, dtype=torch.float64))
    (space,) = states.flat()
    return mixer, seen, space


def dense(seen: dict) -> tuple[Tensor, Tensor, Tensor]:
    """A, C, B of every token: [batch, tokens, heads, d, d], [..., d], [..., d]."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (seen["q"], seen["k"]))
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    alpha, beta = seen["g"].exp(), seen["beta"]
    A = alpha[..., None, None] * (eye - beta[..., None, None] * k.unsqueeze(-1) * k.unsqueeze(-2))
    return A, q / math.sqrt(q.shape[-1]), beta.unsqueeze(-1) * k


def assert_tight(actual: Tensor, expected: Tensor, bound: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound * expected.detach().abs().max().clamp_min(1).item())


@pytest.mark.parametrize("name", list(MODELS))
def test_states_are_the_rule_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen, space = captured(name, monkeypatch)
    A, C, B = dense(seen)
    power, small, drive = B, space.b, torch.randn(7, *B.shape[:3], dtype=B.dtype)
    for _ in range(12):  # impulse responses C A^j B
        assert_tight((space.c * small).sum(-1), (C * power).sum(-1), 1e-12)
        power, small = (A @ power.unsqueeze(-1)).squeeze(-1), space.a * small
    state, two = torch.zeros_like(B), torch.zeros_like(space.b)
    for value in drive.unbind(0):  # outputs of the system that each token holds fixed
        state = (A @ state.unsqueeze(-1)).squeeze(-1) + B * value.unsqueeze(-1)
        two = space.a * two + space.b * value.unsqueeze(-1)
        assert_tight((space.c * two).sum(-1), (C * state).sum(-1), 1e-12)


@pytest.mark.parametrize("name", list(MODELS))
def test_shapes_and_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, _, space = captured(name, monkeypatch)
    for field in ("a", "b", "c"):
        assert getattr(space, field).shape == (2, 9, 4, 2)
    for _, parameter, rows in state_parameters(mixer, "AC-direct"):
        assert parameter[rows if rows is not None else slice(None)].numel() > 0
    assert list(find_mixers(mixer)) == [""]


def observability(a: Tensor, c: Tensor, steps: int = 400) -> Tensor:
    """Rows C A^j: [steps, n]; a: [n, n] or [n]."""
    rows, row = [], c
    for _ in range(steps):
        rows.append(row)
        row = row @ a if a.dim() == 2 else row * a
    return torch.stack(rows)


def test_distances_equal_the_dense_path(monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen, space = captured("qwen3_next", monkeypatch)
    A, C, B = (x[0, :, 0] for x in dense(seen))
    old, new = (space.map(lambda x, i=i: x[0, i, 0]) for i in (0, 1))
    # martin: from the principal angles of the column spaces of the dense observability matrices
    bases = [torch.linalg.svd(observability(A[i], C[i]), full_matrices=False)[0][:, :2] for i in (0, 1)]
    cosines = torch.linalg.svdvals(bases[0].mT @ bases[1])
    martin = infssm.distance(old, new, kind="martin", soft_normalize=False)
    assert_tight(martin, -2 * cosines.log().sum(), 1e-9)
    # output: energy of the difference of the dense impulse responses
    responses = [observability(A[i], C[i]) @ B[i] for i in (0, 1)]
    output = infssm.distance(old, new, kind="output", soft_normalize=False)
    assert_tight(output, (responses[0] - responses[1]).square().sum(), 1e-9)


def test_gradients_and_padding() -> None:
    mixer, _ = mixer_of("olmo_hybrid")
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    with record_states(mixer) as states:
        mixer(hidden, attention_mask=mask)
    (space,) = states.flat()
    assert space.without_padding().a.shape == (5, 4, 2)
    sum(x.square().sum() for x in (space.a, space.b, space.c)).backward()
    assert all(torch.isfinite(p.grad).all() for p in (mixer.q_proj.weight, mixer.k_proj.weight, mixer.A_log))
    with pytest.raises(ConfigError, match="b_mode='raw'"), record_states(mixer, b_mode="zoh"):
        mixer(hidden)


def test_unnormalised_keys_and_gradcheck() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, 5, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    alpha, beta = (torch.rand(3, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    space = two_states(q, k, alpha, beta)
    A = alpha[:, None, None] * (torch.eye(5) - beta[:, None, None] * k.unsqueeze(-1) * k.unsqueeze(-2))
    power, small = beta.unsqueeze(-1) * k, space.b
    for _ in range(5):
        assert_tight((space.c * small).sum(-1), (q * power).sum(-1), 1e-12)
        power, small = (A @ power.unsqueeze(-1)).squeeze(-1), space.a * small
    torch.autograd.gradcheck(lambda *x: (lambda s: (s.a, s.b, s.c))(two_states(*x)), (q, k, alpha, beta))
