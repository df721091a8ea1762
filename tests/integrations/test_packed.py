"""Packed sequences in accelerated layers: each sequence of a row gives what it gives alone, also its states."""

import pytest
import torch

from infssm.errors import ConfigError
from infssm.integrations.transformers import accelerate
from infssm.ssm import find_mixers, record_states
from tests.ssm.hf import FAMILIES, WIDTH, make, tokens

LENGTHS = (3, 1, 5)
SEQ_IDX = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]
FORMS = {
    "seq_idx": SEQ_IDX,
    "cu_seqlens": torch.tensor([0, 3, 4, 9]),
    "cu_seq_lens_q": torch.tensor([0, 3, 4, 9]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4]]),
}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "zamba"])
def test_packed_equals_separate(family: str, form: str) -> None:
    model = accelerate(make(family)).eval()
    mixer = next(iter(find_mixers(model).values()))
    hidden = torch.randn(1, sum(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with record_states(mixer) as states:
        packed = mixer(hidden, **{form: FORMS[form]})
    (space,) = states.flat()
    parts, spaces = [], []
    for part in hidden.split(LENGTHS, dim=1):
        with record_states(mixer) as states:
            parts.append(mixer(part))
        spaces += states.flat()
    each, grad = torch.cat(parts, dim=1), torch.randn(packed.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(packed, each, rtol=1e-5, atol=1e-5)
    for name in ("a", "b", "c"):
        separate = torch.cat([getattr(one, name) for one in spaces], dim=1)
        torch.testing.assert_close(getattr(space, name), separate, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(y, (hidden, mixer.conv1d.weight), grad) for y in (packed, each)]
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5 * float(right.abs().max().clamp_min(1)))


def test_a_whole_model() -> None:
    model = accelerate(make("mamba2")).backbone.eval()  # the language model around it drops seq_idx
    ids = tokens(batch=1).repeat(1, 2)[:, : sum(LENGTHS)]
    packed = model(input_ids=ids, seq_idx=SEQ_IDX, use_cache=False)[0]
    each = torch.cat([model(input_ids=part, use_cache=False)[0] for part in ids.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed, each, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_packed_is_refused() -> None:
    model = accelerate(make("mamba2")).backbone.eval()
    mixer = next(iter(find_mixers(model).values()))
    hidden = torch.randn(2, 9, WIDTH)
    with pytest.raises(ConfigError, match="use_cache=False"):
        model(input_ids=tokens(batch=1), seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), use_cache=True)
    with pytest.raises(ConfigError, match="give seq_idx instead"):
        mixer(hidden, cu_seqlens=torch.tensor([0, 4, 9]))
    with pytest.raises(ConfigError, match="seq_idx has shape"):
        mixer(hidden, seq_idx=SEQ_IDX[0])
