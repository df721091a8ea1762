"""Padding tokens are masked out: `StateSpace.mask` marks them, and no penalty counts them."""

import pytest
import torch

import infssm
from infssm.integrations.transformers import accelerate
from infssm.ssm import record_states
from tests.ssm.hf import FAMILIES, VOCAB, make

CASES = [(family, fast) for family in FAMILIES for fast in (False, True) if not (fast and family == "zamba")]
EXPERTS = ("jamba", "granite-moe-hybrid")
"""Their mixture of experts has no float64."""


@pytest.mark.parametrize(("family", "fast"), CASES, ids=[f"{name}{'-fast' if fast else ''}" for name, fast in CASES])
def test_penalty_is_unchanged_by_padding(family: str, fast: bool) -> None:
    model = make(family).eval()
    if family not in EXPERTS:
        model = model.double()
    if fast:
        accelerate(model)
    attached = infssm.attach(model, "inf-ssm-exact+lwf-ac", **{"inf-ssm-exact.weight": 1.0, "lwf-ac.weight": 1.0})
    attached.begin_task(0)
    attached.end_task(0)
    attached.begin_task(1)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(index), dtype=parameter.dtype
            )
    ids = torch.randint(1, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids, torch.zeros(2, 15, dtype=torch.long)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(2, 15, dtype=torch.long)], dim=1)
    penalties = []
    for inputs in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask}):
        model(**inputs, use_cache=False)
        penalties.append(attached.penalty_terms({**inputs, "use_cache": False}))
    plain, with_padding = penalties
    assert all(term > 0 for term in plain.values())
    torch.testing.assert_close(with_padding, plain, rtol=1e-5 if family in EXPERTS else 1e-6, atol=0)


def test_states_say_which_tokens_are_padding() -> None:
    model = make("mamba").eval()
    ids = torch.ones(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with record_states(model) as states:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    for space in states.flat():
        assert space.mask is not None
        assert space.mask.tolist() == mask.bool().tolist()
        assert space.a.shape[:2] == (2, 4)
        assert torch.equal(space.without_padding().a, space.a[mask.bool()])  # a choice of elements
        assert space.map_batch(lambda x: x[:1]).without_padding().a.shape[0] == 3
    with record_states(model) as states:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    assert all(space.mask is None for space in states.flat())


@pytest.mark.parametrize("fast", [False, True], ids=["", "fast"])
def test_a_batch_of_padding_alone_has_no_penalty(fast: bool) -> None:
    model = make("mamba")
    if fast:
        accelerate(model)
    method = infssm.attach(model, "lwf+lwf-f+lwf-ac+inf-ssm-exact", measure_at=1)
    method.begin_task(1)
    inputs = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.zeros(2, 4)}
    for _ in range(2):  # the second time with a weight that was measured
        model(**inputs)
        penalty = method.penalty(inputs)
        assert penalty.item() == 0
        penalty.backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
        method.after_step()
