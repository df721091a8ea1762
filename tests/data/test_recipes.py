"""Recipes against references that go image by image."""

import colorsys
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from infssm.data import LightRecipe, Stats, StrongRecipe, load_dataset, make_recipe, strong_recipe
from infssm.data.augmentation import _crop, grey, turn_hue
from infssm.data.images import to_pil, to_raw
from infssm.data.recipes import CIFAR100, IMAGENET, deit_recipe
from infssm.errors import ConfigError
from tests.compare import assert_rounding, identical

from .helpers import fake

STATS = Stats((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def noise(count=6, channels=3, size=8, seed=0):
    return torch.randint(
        256, (count, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def normalized(raw, stats):
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (stats.mean, stats.std))
    return ((raw.double() / 255 - mean) / std).float()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0, 1, 3]), st.booleans())
def test_light_recipe_shifts_flips_and_normalizes(seed, pad, flip):
    recipe = LightRecipe(size=8, stats=STATS, pad=pad, flip=flip)
    raw = noise(seed=seed)
    draws = recipe.draw(6, rng(seed))
    out = recipe.apply(raw, draws)
    for image, (dy, dx, mirrored), result in zip(raw, draws.tolist(), out, strict=True):
        canvas = torch.zeros(3, 8 + 2 * pad, 8 + 2 * pad)
        canvas[:, pad : pad + 8, pad : pad + 8] = image
        window = canvas[:, dy : dy + 8, dx : dx + 8]
        window = window.flip(-1) if mirrored and flip else window
        torch.testing.assert_close(result, normalized(window, STATS), rtol=1e-5, atol=1e-5)


def test_light_draws_cover_all_shifts_and_both_flips():
    draws = LightRecipe(size=8, stats=STATS, pad=2).draw(4000, rng())
    for column, values in ((0, 5), (1, 5), (2, 2)):
        counts = torch.bincount(draws[:, column], minlength=values)
        assert len(counts) == values
        assert (counts > 0.85 * 4000 / values).all()


def test_light_evaluation_only_normalizes():
    recipe = LightRecipe(size=8, stats=STATS, eval_stats=IMAGENET)
    torch.testing.assert_close(recipe.eval(noise()), normalized(noise(), IMAGENET), rtol=1e-5, atol=1e-5)
    assert recipe.eval(noise(size=5)).shape == (6, 3, 8, 8)


@pytest.mark.parametrize("name", ["light", "deit", "strong"])
def test_training_is_a_function_of_the_generator_and_of_each_picture_alone(name):
    dataset = load_dataset("synthetic", classes=2, per_class=8, size=16)
    recipe = make_recipe("light", dataset) if name != "deit" else make_recipe("deit", dataset, size=32)
    recipe = strong_recipe(recipe) if name == "strong" else recipe
    raw = noise(size=16)
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = recipe.train(raw, rng(3))
    assert first.dtype == torch.float32
    assert first.shape == (6, 3, recipe.size, recipe.size)
    assert identical(recipe.train(raw, rng(3)), first)
    assert not identical(recipe.train(raw, rng(4)), first)
    draws = recipe.draw(6, rng(3))
    pick = torch.tensor([4, 1])
    assert_rounding(recipe.apply(raw[pick], draws[pick]), first[pick])
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert identical(before[0], after[0])
    assert before[1:] == after[1:]


def test_deit_steps_are_the_protocols():
    recipe = deit_recipe()
    train = [type(step).__name__ for step in recipe._train.transform.transforms]
    assert train == [
        "RandomResizedCropAndInterpolation",
        "RandomHorizontalFlip",
        "RandAugment",
        "MaybeToTensor",
        "Normalize",
        "RandomErasing",
    ]
    crop, flip, augment, _, normal, erase = recipe._train.transform.transforms
    assert (crop.size, crop.scale) == ((224, 224), (0.08, 1.0))
    assert crop.ratio == pytest.approx((3 / 4, 4 / 3))
    assert flip.p == 0.5
    assert len(augment.ops) == 15
    assert augment.num_layers == 2
    assert {(op.prob, op.magnitude, op.magnitude_std) for op in augment.ops} == {(0.5, 9, 0.5)}
    assert augment.ops[0].kwargs["fillcolor"] == tuple(round(255 * m) for m in IMAGENET.mean)
    assert normal.mean.tolist() == pytest.approx(IMAGENET.mean)
    assert (erase.probability, erase.min_area, erase.per_pixel, erase.max_count) == (0.25, 0.02, True, 1)
    assert erase.max_area == pytest.approx(1 / 3)
    assert (recipe.size, recipe.raw_size) == (224, 256)


def test_deit_evaluation_resizes_and_crops():
    array = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    recipe = deit_recipe(size=28)
    resized = image.resize((48, 32), Image.Resampling.BICUBIC).crop((10, 2, 38, 30))
    expected = normalized(torch.from_numpy(np.array(resized)).permute(2, 0, 1), IMAGENET)
    torch.testing.assert_close(recipe.eval_image(image), expected, rtol=1e-5, atol=1e-5)
    # A raw image kept in a replay buffer is evaluated as the file it came from.
    raw = to_raw(image, recipe.raw_size)
    torch.testing.assert_close(recipe.eval(raw[None])[0], expected, rtol=1e-5, atol=1e-5)


def test_every_randaugment_operation_works_at_every_magnitude():
    """Magnitude 10 asks to posterize to no bits, which newer Pillow refuses; black is what it meant."""
    recipe = deit_recipe(size=16)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    augment = recipe._train.transform.transforms[2]
    for operation in augment.ops:
        operation.prob, operation.magnitude_std = 1.0, 0
        for magnitude in range(11):
            operation.magnitude = magnitude
            result = operation(image)
            assert result.size == image.size
            if operation.name == "PosterizeIncreasing" and magnitude == 10:
                assert not np.array(result).any()


def test_authors_normalization_and_validation_are_named_options():
    cifar = fake(200, 100, 100, size=32, channels=3, name="cifar100")
    raw = noise(size=32)
    plain = make_recipe("light", cifar)
    torch.testing.assert_close(plain.eval(raw), normalized(raw, CIFAR100), rtol=1e-5, atol=1e-5)
    assert plain.stats == CIFAR100
    assert not plain.augment_val
    authors = make_recipe("none", cifar, eval_normalization="authors", val_transform="train")
    torch.testing.assert_close(authors.eval(raw), normalized(raw, CIFAR100), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(authors.train(raw, rng()), normalized(raw, IMAGENET), rtol=1e-5, atol=1e-5)
    assert authors.augment_val
    deit = make_recipe("deit", cifar, size=32, eval_normalization="authors")
    assert deit._eval.transform.transforms[-1].mean.tolist() == pytest.approx(CIFAR100.mean)
    assert deit._train.transform.transforms[-2].mean.tolist() == pytest.approx(IMAGENET.mean)
    other = make_recipe("deit", fake(200, 100, 100, size=32, channels=3), size=32, eval_normalization="authors")
    assert other._eval.transform.transforms[-1].mean.tolist() == pytest.approx(IMAGENET.mean)


def test_digits_are_never_mirrored():
    digits = load_dataset("digits")
    recipe = make_recipe("light", digits)
    assert (recipe.size, recipe.pad, recipe.flip) == (8, 1, False)
    assert not strong_recipe(recipe).flip
    values = recipe.eval(digits.images.pixels)
    assert abs(values.mean()) < 2e-3
    assert abs(values.std() - 1) < 2e-3


def test_grey_pictures_pass_recipes_of_three_channels():
    digits = load_dataset("digits")
    raw = digits.images.pixels[:2]
    deit = make_recipe("deit", digits, size=16)
    strong = strong_recipe(deit)
    for recipe in (deit, strong):
        assert recipe.train(raw, rng()).shape == (2, 3, 16, 16)
        assert recipe.eval(raw).shape == (2, 3, 16, 16)


def test_normalizing_leaves_its_input_alone():
    raw = noise().float()
    STATS.normalize(raw)
    assert identical(raw, noise().float())


def test_unknown_names_and_sizes():
    dataset = fake(20, 2, size=8, channels=3)
    with pytest.raises(ConfigError, match="did you mean 'light'"):
        make_recipe("ligth", dataset)
    with pytest.raises(ConfigError, match="eval_normalization"):
        make_recipe("light", dataset, eval_normalization="cifar")
    with pytest.raises(ConfigError, match="val_transform"):
        make_recipe("light", dataset, val_transform="both")
    wide = fake(20, 2, size=8, channels=3)
    object.__setattr__(wide.images, "pixels", wide.images.pixels[:, :, :4])
    with pytest.raises(ConfigError, match="4x8; choose the size"):
        make_recipe("light", wide)


def test_hue_turns_as_in_hsv():
    x = torch.rand(3, 3, 4, 4, generator=rng())
    turns = torch.tensor([0.1, -0.07, 0.0]).view(3, 1, 1)
    out = turn_hue(x, turns)
    for n in range(3):
        for i in range(4):
            for j in range(4):
                h, s, v = colorsys.rgb_to_hsv(*x[n, :, i, j].tolist())
                expected = colorsys.hsv_to_rgb((h + turns[n].item()) % 1, s, v)
                assert out[n, :, i, j].tolist() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(out[2], x[2])


def test_crop_of_the_whole_picture_is_the_picture_and_of_a_ramp_a_ramp():
    x = torch.rand(2, 3, 8, 8, generator=rng())
    whole = torch.tensor([[1.0, 0.5, 0.3, 0.9]] * 2)
    flips = torch.tensor([False, True])
    out = _crop(x, whole, flips, 8)
    torch.testing.assert_close(out[0], x[0])
    torch.testing.assert_close(out[1], x[1].flip(-1))
    # Area 0.2 + 0.8 * 0.0625 = 1/4 at aspect 1 is half of each side; offset 0 is the left edge.
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    cut = _crop(ramp, torch.tensor([[0.0625, 0.5, 0.0, 0.0]]), torch.tensor([False]), 4)
    torch.testing.assert_close(cut, torch.arange(4.0).expand(1, 1, 4, 4))


def test_strong_probabilities_and_grey():
    recipe = StrongRecipe(size=4, stats=Stats((0.0,) * 3, (1.0,) * 3))
    raw = noise(600, size=4)
    out = recipe.train(raw, rng())
    assert out.min() >= 0
    assert out.max() <= 1
    is_grey = (out.std(dim=1).amax(dim=(1, 2)) < 1e-4).float().mean()
    assert 0.15 < is_grey < 0.25
    one = torch.tensor([[[[0.5]], [[0.25]], [[1.0]]]])
    assert grey(one).item() == pytest.approx(0.299 * 0.5 + 0.587 * 0.25 + 0.114)
    assert recipe.eval(raw).allclose(raw.float() / 255, atol=1e-6)


def test_strong_without_jitter_or_grey_is_the_crop():
    recipe = StrongRecipe(size=8, stats=Stats((0.0,) * 3, (1.0,) * 3))
    draws = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.9, 0.1, 0.2, 0.3, 0.4, 0.95, 0.95]])
    raw = noise(1)
    torch.testing.assert_close(recipe.apply(raw, draws), raw / 255.0)
    draws[0, 9] = 0.0  # jitter on; brightness factor 1 - 0.4 * 0.8 = 0.68 is seen in a grey image's mean
    level = torch.full((1, 1, 8, 8), 100, dtype=torch.uint8)
    mono = StrongRecipe(size=8, stats=Stats((0.0,), (1.0,)))
    torch.testing.assert_close(mono.apply(level, draws), torch.full((1, 1, 8, 8), 0.68 * 100 / 255))


def test_pictures_and_raw_tensors_convert_both_ways():
    for channels in (1, 3):
        raw = noise(1, channels)[0]
        assert identical(to_raw(to_pil(raw), 8), raw)
    assert to_raw(Image.new("RGB", (10, 30)), 7).shape == (3, 7, 7)
