from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from infssm.errors import ConfigError
from infssm.methods.bases import wrapped as parts
from infssm.methods.bases.clfd import CLFD
from tests.compare import identical
from tests.methods import toys
from tests.methods.replaying import build, optimizer_of, step, train
from tests.methods.toys import TASKS


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_haar_of_a_constant_image() -> None:
    bands = parts.haar(torch.full((1, 3, 4, 6), 1.5, dtype=torch.float64))
    assert identical(bands.ll, torch.full((1, 3, 2, 3), 3.0, dtype=torch.float64))
    assert all(not band.any() for band in bands[1:])


def test_haar_equals_the_transform_by_matrices() -> None:
    x, s = normal(2, 1, 6, 4), 1 / math.sqrt(2)

    def filters(size: int, sign: float) -> torch.Tensor:
        matrix = torch.zeros(size // 2, size, dtype=torch.float64)
        for row in range(size // 2):
            matrix[row, 2 * row], matrix[row, 2 * row + 1] = s, sign * s
        return matrix

    low, high = (filters(6, 1), filters(4, 1)), (filters(6, -1), filters(4, -1))
    bands = parts.haar(x)
    torch.testing.assert_close(bands.ll, low[0] @ x @ low[1].T)
    torch.testing.assert_close(bands.lh, high[0] @ x @ low[1].T)
    torch.testing.assert_close(bands.hl, low[0] @ x @ high[1].T)
    torch.testing.assert_close(bands.hh, high[0] @ x @ high[1].T)
    torch.testing.assert_close(sum(b.square().sum() for b in bands), x.square().sum())  # orthonormal
    with pytest.raises(ConfigError, match="must be even"):
        parts.haar(normal(1, 1, 5, 4))


def test_the_encoder_starts_near_a_grey_image() -> None:
    torch.manual_seed(0)
    encoder, x = parts.FrequencyEncoder(3, 3).double(), normal(2, 3, 8, 8)
    encoded = encoder(x)
    assert encoded.features.shape == (2, 3, 4, 4)
    torch.testing.assert_close(encoded.features[:, 0], F.avg_pool2d(x.mean(1, keepdim=True), 2)[:, 0])
    bands = parts.haar(x)
    high = torch.cat(bands[1:], dim=1)
    torch.testing.assert_close(encoded.features[:, 2:], F.conv2d(high, encoder.high.weight))
    torch.testing.assert_close(encoded.features[:, 1:2], F.conv2d(torch.cat(bands, dim=1), encoder.all.weight))
    assert parts.FrequencyEncoder(1, 1)(torch.zeros(2, 1, 4, 4)).features.shape == (2, 1, 2, 2)
    with pytest.raises(ConfigError, match="1 or 3 maps"):
        parts.FrequencyEncoder(2, 2)


@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.0])
def test_selection_keeps_the_largest(ratio: float) -> None:
    features = normal(4, 10)
    mask = parts.largest(features, ratio)
    count = int(ratio * 10)
    for row, kept in zip(features, mask, strict=True):
        order = sorted(range(10), key=lambda i: -abs(float(row[i])))[:count]
        assert sorted(torch.nonzero(kept).flatten().tolist()) == sorted(order)


def test_selection_with_classes() -> None:
    features, allowed = normal(3, 10), torch.zeros(2, 10, dtype=torch.bool)
    allowed[0, :5] = True
    selected = parts.FeatureSelection(0.6)(features, allowed)
    assert identical(selected.features[0, :5], features[0, :5])  # fewer are allowed than may be selected
    assert not selected.features[0, 5:].any()
    assert not selected.features[1].any()
    assert selected.mask.sum(1).tolist() == [5, 0, 6]
    assert identical(selected.features[2] != 0, selected.mask[2])


def test_probabilities_by_hand() -> None:
    counts = torch.tensor([[4.0, 2.0, 0.0], [1.0, 0.0, 5.0]], dtype=torch.float64)
    later = [[1 - math.exp(-2 * n / max(row)) for n in row] for row in counts.tolist()]
    torch.testing.assert_close(parts.later_probabilities(counts), torch.tensor(later, dtype=torch.float64))
    similarity = torch.tensor([0.8, -0.2], dtype=torch.float64)
    mean = (1.8 + 0.8) / 2
    expected = [
        (math.exp(-far / 5 * mean / 0.8) + 1 - math.exp(-near / 4 * 1.8 / mean)) / 2
        for near, far in zip([4.0, 2.0, 0.0], [1.0, 0.0, 5.0], strict=True)
    ]
    torch.testing.assert_close(
        parts.first_probabilities(similarity, counts), torch.tensor(expected, dtype=torch.float64)
    )
    assert parts.share_of(0.6, 10) == 6
    assert parts.share_of(1.0, 10) == 10


@pytest.mark.parametrize(("size", "reach", "flip"), [(16, 2, True), (16, 2, False), (8, 1, True), (4, 0, True)])
def test_crops_are_shifts_with_the_colour_outside(size: int, reach: int, flip: bool) -> None:
    maps, fill = normal(40, 2, size, size), torch.tensor([7.0, -7.0], dtype=torch.float64)
    out = parts.jitter_crop(maps, fill, torch.Generator().manual_seed(0), flip=flip)
    padded = fill[None, :, None, None].expand(40, 2, size + 2 * reach, size + 2 * reach).clone()
    padded[..., reach : reach + size, reach : reach + size] = maps
    offsets, seen = range(2 * reach + 1), set()
    for image, source in zip(out, padded, strict=True):
        crops = {
            (t, s, f): source[:, t : t + size, s : s + size].flip([-1] if f else [])
            for t, s, f in itertools.product(offsets, offsets, (False, True))
        }
        found = [place for place, crop in crops.items() if identical(image, crop)]
        assert len(found) == 1
        seen.update(found)
    assert {f for _, _, f in seen} == ({False, True} if flip else {False})
    assert {t for t, _, _ in seen} == {s for _, s, _ in seen} == set(offsets)


def test_native_input_halves_the_grid_and_upsampling_keeps_it() -> None:
    native, upsampled = build("clfd", adapt="native"), build("clfd", adapt="upsample")
    assert native.module.model.grid_size == (1, 1)
    assert upsampled.module.model.grid_size == (2, 2)
    x = toys.batch(TASKS[0]).x
    assert native.module(x).shape == upsampled.module(x).shape == (4, 6)
    with pytest.raises(ConfigError, match="adapt='upsample'"):
        build("clfd", model=toys.vim(img_size=4), adapt="native")
    with pytest.raises(ConfigError, match="Linear has no embed, encode, pool, img_size"):
        build("clfd", model=torch.nn.Linear(2, 6))


@pytest.mark.parametrize(("pixels", "grid"), [(8, (2, 2)), (32, (4, 4)), (24, (6, 6))])
def test_small_images_keep_their_grid(pixels: int, grid: tuple[int, int]) -> None:
    assert build("clfd", model=toys.vim(img_size=pixels)).module.model.grid_size == grid


def test_the_first_task_freezes_the_encoder_in_its_last_epoch() -> None:
    method = build("clfd")
    base, batches = method.base, toys.loader(TASKS[0])
    assert isinstance(base, CLFD)
    method.begin_task(TASKS[0])
    optimizer, start = optimizer_of(method), base.encoder.all.weight.detach().clone()
    for epoch in range(3):
        method.begin_epoch(epoch, 3)
        if epoch == 2:
            assert len(base.buffer) == 0  # entries of a moving encoder are dropped
            final = base.encoder.all.weight.detach().clone()
        for batch in batches:
            step(method, batch, optimizer)
        method.end_epoch(epoch, 3)
    assert not identical(start, final)
    assert identical(base.encoder.all.weight, final)
    x = torch.cat([b.x for b in batches])
    torch.testing.assert_close(base.buffer["features"], base.encoder(x).features.detach().float())
    looks = torch.stack([parts.haar(x[torch.cat([b.y for b in batches]) == c]).ll.sum(0).flatten() for c in (0, 1)])
    torch.testing.assert_close(base.appearance[:2], looks.float())
    method.end_task(TASKS[0])
    assert base.buffer.seen == 3 * 8
    method.begin_task(TASKS[1])
    assert not base.encoder.all.weight.requires_grad
    train(method, TASKS[1])
    assert identical(base.encoder.all.weight, final)


def test_an_earlier_best_epoch_refills_the_buffer_with_its_encoder() -> None:
    for loader in (toys.loader(TASKS[0]), None):
        method = build("clfd")
        base, batches = method.base, toys.loader(TASKS[0])
        method.begin_task(TASKS[0])
        method.begin_epoch(0, 1)
        optimizer = optimizer_of(method)
        for batch in batches:
            step(method, batch, optimizer)
        method.end_epoch(0, 1)
        kept = base.encoder.all.weight.detach().clone()
        toys.nudge(base.encoder)  # what restoring the best weights does
        method.end_task(TASKS[0], loader)
        assert identical(base.encoder.all.weight, kept) == (loader is None)
        expected = base.encoder(torch.cat([b.x for b in batches])).features.detach().float()
        torch.testing.assert_close(base.buffer["features"], expected)


def test_a_best_epoch_before_the_encoder_was_final() -> None:
    method = build("clfd")
    base, batches = method.base, toys.loader(TASKS[0])
    method.begin_task(TASKS[0])
    optimizer, saved = optimizer_of(method), None
    for epoch in range(2):
        method.begin_epoch(epoch, 2)
        for batch in batches:
            step(method, batch, optimizer)
        method.end_epoch(epoch, 2)
        saved = saved or (copy.deepcopy(method.module.state_dict()), method.state_dict())
    looks = base.appearance.clone()
    method.load_state_dict(saved[1])
    method.module.load_state_dict(saved[0])
    assert base.frozen is None
    with pytest.raises(ConfigError, match="loader"):
        method.end_task(TASKS[0])
    method.end_task(TASKS[0], batches)
    expected = base.encoder(torch.cat([b.x for b in batches])).features.detach().float()
    torch.testing.assert_close(base.buffer["features"], expected)
    torch.testing.assert_close(base.appearance, looks)
    assert identical(base.encoder.all.weight, saved[0]["encoder.all.weight"])


def test_terms_and_counters_of_a_step_by_hand() -> None:
    method = build("clfd", replay_batch=5, adapt="native")
    train(method, TASKS[0])
    base, batch, module = method.base, toys.batch(TASKS[1]), method.module
    method.begin_task(TASKS[1])
    method.begin_epoch(0, 2)
    buffer, counts = base.buffer, base.new_counts.clone()
    twin = torch.Generator()
    twin.set_state(buffer.generator.get_state())
    entries = buffer.get(torch.randperm(len(buffer), generator=twin)[:5])
    crop, draw = (torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=twin))) for _ in range(2))
    blank = base.encoder(torch.zeros(1, 1, 8, 8, dtype=torch.float64)).features[0, :, 0, 0].detach()
    maps = parts.jitter_crop(entries["features"], blank.float(), crop, flip=True).double()
    allowed = torch.rand(16, generator=draw) < 0.6  # the ratio, for classes that are new
    v = module.model.pool(module.model.forward_features(base.encoder(batch.x).features)) * allowed
    kept = parts.largest(v, 0.6)
    terms = method.loss(batch)
    torch.testing.assert_close(terms["ce"], F.cross_entropy(module.model.head(v * kept), batch.y))
    r = module.model.pool(module.model.forward_features(maps))
    expected = F.cross_entropy(module.model.head(r * parts.largest(r, 0.6)), entries["label"])
    torch.testing.assert_close(terms["replay"], expected)
    for row, label in zip(kept, batch.y, strict=True):
        counts[label] += row
    assert identical(base.new_counts, counts)


def test_probabilities_follow_the_epochs() -> None:
    method = build("clfd")
    base = method.base
    method.begin_task(TASKS[0])
    method.begin_epoch(0, 10)
    assert base.probabilities[:2].sum(1).tolist() == [10.0, 10.0]  # int(1.1 * 0.6 * 16)
    assert not base.probabilities[2:].any()
    train(method, TASKS[0], epochs=2)
    old_counts = base.counts[:2].clone()
    torch.testing.assert_close(base.probabilities[:2], parts.later_probabilities(old_counts))
    batches = toys.loader(TASKS[1])
    method.begin_task(TASKS[1])
    optimizer = optimizer_of(method)
    method.begin_epoch(0, 10)
    assert identical(base.probabilities[2:4], torch.full((2, 16), 0.6))
    for batch in batches:
        step(method, batch, optimizer)
    method.end_epoch(0, 10)
    looks = F.normalize(base.appearance, dim=1)
    for label in (2, 3):
        expected = parts.first_probabilities(looks[:2] @ looks[label], old_counts)
        torch.testing.assert_close(base.probabilities[label], expected)
    assert base.counts[2:4].sum() > 0
    assert identical(base.counts[:2], old_counts)  # replay does not count
    method.begin_epoch(4, 10)
    method.end_epoch(4, 10)  # the first epoch past 0.4 of all
    torch.testing.assert_close(base.probabilities[:4], parts.later_probabilities(base.counts[:4]))
    assert not base.probabilities[4:].any()


def test_evaluation_selects_without_classes() -> None:
    method = build("clfd", adapt="native")
    train(method, TASKS[0])
    module, x = method.module.eval(), toys.batch(TASKS[0]).x
    v = module.model.pool(module.model.forward_features(module.encoder(x).features))
    torch.testing.assert_close(module(x), module.model.head(v * parts.largest(v, 0.6)))


def test_epochs_must_be_announced() -> None:
    method = build("clfd")
    method.begin_task(TASKS[0])
    with pytest.raises(ConfigError, match="begin_epoch"):
        method.loss(toys.batch(TASKS[0]))
