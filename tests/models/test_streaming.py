"""States in and out of causal models: chunks equal the whole sequence, gradients too; generation token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from infssm._torchvision import torchvision
from infssm.errors import ConfigError
from infssm.models import create_model, generate
from infssm.models.generate import sample
from tests.models.small import SMALL, Tap, mixers, scramble

CAUSAL = ["mamba_nano", "mamba_130m", "mamba2_130m", "mamba_lm_nano", "mamba2_lm_nano", "s4d_nano", "s4d_base"]
TOKENS = 40


def build(name: str, dtype: torch.dtype):
    model = SMALL[name].build(name)
    scramble(model, 0.1)
    x = SMALL[name].make_input()
    tokens = torch.randint(0, 50, (2, TOKENS)) if not x.is_floating_point() else torch.randn(2, TOKENS, 3, dtype=dtype)
    return model.to(dtype), tokens


def in_chunks(model, x: Tensor, sizes: list[int]):
    """Logits (of a language model: of all tokens) and the sizes of the states on the way."""
    state, outputs, sizes_of_states = None, [], set()
    for chunk in x.split(sizes, dim=1):
        logits, state = model(chunk, state=state, return_state=True)
        outputs.append(logits)
        sizes_of_states.add(state.nbytes)
    return torch.cat(outputs, dim=1) if logits.ndim == 3 else logits, sizes_of_states


@pytest.mark.parametrize("name", CAUSAL)
def test_chunks_equal_the_whole_sequence_and_so_do_gradients(name):
    model, x = build(name, torch.float64)
    whole = model(x)
    weights = torch.randn_like(whole)
    (whole * weights).sum().backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    for sizes in ([1] * TOKENS, [7, 1, 20, 12]):
        model.zero_grad()
        logits, _ = in_chunks(model, x, sizes)
        assert_close(logits, whole)
        (logits * weights).sum().backward()
        for key, parameter in model.named_parameters():
            assert_close(parameter.grad, expected[key], msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", CAUSAL)
def test_states_have_one_size_and_chunks_in_float32_equal_the_whole(name):
    model, x = build(name, torch.float32)
    model.eval()
    with torch.no_grad():
        whole = model(x)
        for sizes in ([1] * TOKENS, [7] * 5 + [5]):
            logits, sizes_of_states = in_chunks(model, x, sizes)
            assert_close(logits, whole, rtol=1e-4, atol=1e-5)
            assert len(sizes_of_states) == 1


def test_detach_ends_back_propagation():
    model, x = build("mamba_nano", torch.float32)
    _, state = model(x[:, :5], return_state=True)
    assert all(tensor.requires_grad for tensor in state.tensors())
    assert not any(tensor.requires_grad for tensor in state.detach().tensors())
    assert state.detach().tokens == 5
    logits = model(x[:, 5:], state=state.detach())
    assert_close(logits, model(x), rtol=1e-4, atol=1e-5)


def test_recorded_states_are_those_of_the_whole_sequence():
    for name in ("mamba_nano", "mamba2_130m"):
        model, x = build(name, torch.float64)
        found = []
        for sizes in ([TOKENS], [17, 23]):
            tap = Tap()
            for mixer in mixers(model):
                mixer.tap = tap
            in_chunks(model, x, sizes)
            found.append([torch.cat([e[1][0].c for e in tap.emitted[i::2]], dim=1) for i in range(2)])
        assert_close(*found)


def test_what_cannot_be_carried_on_is_refused():
    vim = SMALL["vim_nano"].build("vim_nano")
    with pytest.raises(ConfigError, match="both directions"):
        vim(SMALL["vim_nano"].make_input(), return_state=True)
    vmamba = SMALL["vmamba_nano"].build("vmamba_nano")
    with pytest.raises(ConfigError, match="both directions"):
        vmamba.initial_state(1)
    model, x = build("mamba_nano", torch.float32)
    with pytest.raises(ConfigError, match="mask and state"):
        model(x, torch.ones(2, TOKENS, dtype=torch.bool), return_state=True)
    _, state = model(x, return_state=True)
    with pytest.raises(ConfigError, match="batch size of 2"):
        model(x[:1], state=state)
    with pytest.raises(ConfigError, match="at least one token"):
        model(x[:, :0], state=state)


@pytest.mark.parametrize("name", ["mamba_lm_nano", "mamba2_lm_nano"])
def test_greedy_generation_equals_repeated_full_forwards(name):
    model, x = build(name, torch.float64)
    tokens = x[:, :4]
    for _ in range(30):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(model, x[:, :4], 30, temperature=0), tokens)
    assert model.training


def test_sampling_follows_the_probabilities_and_the_generator():
    torch.manual_seed(0)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4)
    shares = [sample(logits, 1.0, p, None).bincount(minlength=4) / 20_000 for p in (1.0, 0.6, 0.1)]
    expected = [[0.5, 0.3, 0.15, 0.05], [0.625, 0.375, 0, 0], [1, 0, 0, 0]]
    assert_close(torch.stack(shares), torch.tensor(expected), rtol=0, atol=0.02)
    model, x = build("mamba_lm_nano", torch.float32)
    one, other, third = (generate(model, x[:, :1], 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)


def test_transformers_models_generate_by_themselves():
    torchvision()
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = MambaForCausalLM(config).double().eval()
    tokens = prompt = torch.randint(0, 20, (2, 3))
    for _ in range(6):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(model, prompt, 6, temperature=0), tokens)
    before = torch.get_rng_state()
    one, other = (generate(model, prompt, 6, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_prompts_and_options_that_make_no_sense_are_refused():
    model, x = build("mamba_lm_nano", torch.float32)
    for options in ({"length": 0}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}):
        with pytest.raises(ConfigError, match="expected"):
            generate(model, x, **{"length": 1, **options})
    with pytest.raises(ConfigError, match="at least one token"):
        generate(model, x[:, :0], 1)
    with pytest.raises(ConfigError, match="cannot generate"):
        generate(create_model("s4d_nano"), x, 1)
