"""Reservoir, balanced and herded buffers: statistics, limits, resuming."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infssm._processes import gather_rows, process_slice
from infssm.errors import CheckpointError, ConfigError
from infssm.methods.bases.lucir import herd
from infssm.methods.bases.xder import spread
from infssm.methods.replay.buffers import FIELDS, BalancedBuffer, Buffer, ReservoirBuffer
from tests.compare import identical


def rows(start: int, count: int) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    return {"image": (number % 256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2), "label": number}


def filled(capacity: int, offered: int, batch: int, seed: int) -> ReservoirBuffer:
    buffer = ReservoirBuffer(capacity, ("image", "label"), seed=seed)
    for start in range(0, offered, batch):
        buffer.offer(**rows(start, min(batch, offered - start)))
    return buffer


def test_reservoir_inclusion_is_uniform():
    capacity, offered, seeds = 8, 40, 1500
    counts = torch.zeros(offered, dtype=torch.float64)
    for seed in range(seeds):
        counts[filled(capacity, offered, 7, seed)["label"]] += 1
    expected = seeds * capacity / offered
    # Each run holds exactly `capacity` rows: inclusions of one row have variance p(1 - p), hence the factor.
    chi2 = ((counts - expected).square() / (expected * (1 - capacity / offered))).sum() * (offered - 1) / offered
    assert counts.sum() == seeds * capacity
    assert chi2 < 69.3  # 99.8 % quantile of chi-square with 39 degrees of freedom
    assert chi2 > 15.0  # and not better than chance allows: 0.02 %


def test_reservoir_fills_in_order_then_counts_over_epochs():
    buffer = filled(10, 10, 4, seed=0)
    assert buffer["label"].tolist() == list(range(10))
    buffer.offer(**rows(0, 10))
    assert buffer.seen == 20
    assert len(buffer) == 10


def test_reservoir_matches_the_rule_row_by_row():
    buffer = ReservoirBuffer(4, ("image", "label"), seed=5)
    generator = torch.Generator().manual_seed(5)
    slots: list[int | None] = [None] * 4
    for start in (0, 6, 12):
        buffer.offer(**rows(start, 6))
        drawn = torch.randint(2**62, (6,), generator=generator)
        for offset in range(6):
            n = start + offset
            r = n if n < 4 else int(drawn[offset]) % (n + 1)
            if r < 4:
                slots[r] = n
    assert buffer["label"].tolist() == slots


@given(capacity=st.integers(1, 9), batches=st.lists(st.integers(1, 7), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_memory_is_taken_once_and_never_exceeded(capacity: int, batches: list[int], seed: int):
    buffer = ReservoirBuffer(capacity, ("image", "label"), seed=seed)
    sizes = set()
    for count in batches:
        buffer.offer(**rows(buffer.seen, count))
        sizes.add(buffer.nbytes)
        assert len(buffer) == min(capacity, buffer.seen)
    assert sizes == {capacity * (4 + 8)}


def test_sampling_is_without_replacement_and_uniform():
    buffer = filled(6, 6, 6, seed=1)
    counts = torch.zeros(6)
    for _ in range(600):
        drawn = buffer.sample(2)
        assert len(drawn.unique()) == 2
        counts[drawn] += 1
    assert (counts - 200).abs().max() < 60
    assert sorted(buffer.sample(99).tolist()) == list(range(6))


def test_resume_is_bit_exact_through_a_file():
    buffer = filled(5, 23, 4, seed=3)
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    resumed = ReservoirBuffer(5, ("image", "label"), seed=99)
    resumed.load_state_dict(torch.load(file))
    for one in (buffer, resumed):
        one.offer(**rows(23, 17))
    assert identical(buffer["image"], resumed["image"])
    assert identical(buffer["label"], resumed["label"])
    assert identical(buffer.sample(3), resumed.sample(3))
    assert identical(
        torch.rand(4, generator=buffer.fresh_generator()), torch.rand(4, generator=resumed.fresh_generator())
    )


def test_saved_state_is_a_copy():
    buffer = filled(5, 5, 5, seed=0)
    state = buffer.state_dict()
    before = copy.deepcopy(state["data"]["label"])
    buffer.offer(**rows(100, 200))
    assert identical(state["data"]["label"], before)


def test_state_of_another_buffer_is_refused():
    state = filled(5, 5, 5, seed=0).state_dict()
    with pytest.raises(CheckpointError, match="resume with the options"):
        ReservoirBuffer(6, ("image", "label")).load_state_dict(state)
    with pytest.raises(CheckpointError, match="resume with the options"):
        ReservoirBuffer(5, ("image", "label", "logits")).load_state_dict(state)


def test_declared_fields_are_kept_to():
    assert FIELDS["image"] is torch.uint8
    with pytest.raises(ConfigError, match="unknown buffer field"):
        Buffer(3, ("label", "pixels"))
    with pytest.raises(ConfigError, match="has a label"):
        Buffer(3, ("image",))
    with pytest.raises(ConfigError, match="holds nothing"):
        Buffer(0, ("label",))
    buffer = ReservoirBuffer(3, ("image", "label"))
    with pytest.raises(ConfigError, match="empty"):
        buffer["image"]
    with pytest.raises(ConfigError, match="uint8"):
        buffer.offer(image=torch.zeros(2, 1, 2, 2), label=torch.zeros(2))
    with pytest.raises(ConfigError, match="stores image, label; got label"):
        buffer.offer(label=torch.zeros(2))
    buffer.offer(**rows(0, 2))
    with pytest.raises(ConfigError, match="one shape"):
        buffer.offer(image=torch.zeros(1, 1, 3, 3, dtype=torch.uint8), label=torch.zeros(1))
    with pytest.raises(ConfigError, match="not 'logits'"):
        buffer["logits"]


def test_clearing_keeps_the_memory():
    buffer = filled(5, 9, 3, seed=0)
    size = buffer.nbytes
    buffer.clear()
    assert (len(buffer), buffer.seen, buffer.nbytes) == (0, 0, size)


def balanced(labels: list[int], capacity: int = 12) -> BalancedBuffer:
    buffer = BalancedBuffer(capacity, ("label", "task"))
    buffer.append(label=torch.tensor(labels), task=torch.arange(len(labels)))
    return buffer


def test_trimming_keeps_the_first_of_each_class():
    buffer = balanced([1, 0, 1, 0, 1, 0, 2])
    buffer.trim(2)
    assert buffer["label"].tolist() == [0, 0, 1, 1, 2]
    assert buffer["task"].tolist() == [1, 3, 0, 2, 6]
    assert buffer.quota(5) == 2


def test_a_full_balanced_buffer_takes_no_more():
    buffer = balanced([0, 1], capacity=3)
    with pytest.raises(ConfigError, match="trim first"):
        buffer.append(label=torch.tensor([2, 2]), task=torch.tensor([0, 0]))
    empty = BalancedBuffer(3, ("label",))
    empty.trim(1)
    assert len(empty) == 0


@given(seed=st.integers(0, 1000), n=st.integers(1, 8), count=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_herding_equals_brute_force_greedy(seed: int, n: int, count: int):
    # Candidates can tie (two points are equally far from their mean), so gaps are compared, not indices.
    features = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    herded = herd(features, count).tolist()
    assert len(herded) == len(set(herded)) == min(count, n)
    for k, pick in enumerate(herded):
        gaps = {
            i: float((features.mean(0) - features[[*herded[:k], i]].mean(0)).norm())
            for i in range(n)
            if i not in herded[:k]
        }
        assert gaps[pick] <= min(gaps.values()) + 1e-12


def test_herding_on_a_line():
    # Mean 2; nearest is 2 itself, then the pair whose mean is nearest to 2: 2 and 3 (2.5) against 2 and 1 (1.5) tie.
    assert herd(torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]), 3).tolist() == [2, 1, 3]


def test_spread_differs_by_at_most_one():
    shares = spread(11, 4, torch.Generator().manual_seed(0))
    assert sorted(shares.tolist()) == [2, 3, 3, 3]
    first = {tuple(spread(5, 4, torch.Generator().manual_seed(seed)).tolist()) for seed in range(40)}
    assert len(first) == 4


def test_one_process_keeps_everything():
    x = torch.arange(5)
    assert gather_rows(x) is x
    assert identical(process_slice(x), x)
