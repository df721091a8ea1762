"""`Stream`: chunks of sounds, series and tokens against the whole sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from infssm.data import ImageFacts, SequenceFacts, SoundFacts
from infssm.data.audio import FrameStream, log_energies, mel_bank
from infssm.errors import ConfigError, DataError
from infssm.learner.learner import Learner
from infssm.learner.predict import Stream
from infssm.models import create_model

RATE, BANDS, SAMPLES = 8000, 10, 1500
SOUND = SoundFacts("sounds", "audio", BANDS, RATE, BANDS)
WAVE = SoundFacts("sounds", "audio", 1, RATE)
SERIES = SequenceFacts("series", "series", 3)


def sizes_of(total: int, size: int | None) -> list[int]:
    """Chunk sizes that add up to ``total``; random ones where ``size`` is None."""
    rng, sizes = np.random.default_rng(0), []
    while sum(sizes) < total:
        sizes.append(min(size or int(rng.integers(1, 200)), total - sum(sizes)))
    return sizes


def model_for(name: str, width: int):
    torch.manual_seed(0)
    options = {"d_state": 8} if name == "s4d_nano" else {"d_state": 8, "headdim": 16} if "2" in name else {}
    return create_model(name, d_model=16, n_layer=2, in_dim=width, num_classes=4, **options).eval()


@pytest.mark.parametrize("size", [1, 7, 160, None])
def test_frames_of_chunks_are_those_of_the_whole_sound(size):
    sound = torch.randn(SAMPLES).clamp(-1, 1) * torch.linspace(0, 1, SAMPLES)
    stream, frames = FrameStream(RATE, BANDS), []
    for chunk in sound.split(sizes_of(SAMPLES, size)):
        complete, rest = stream.push(chunk)
        frames.append(complete)
    whole = log_energies(sound, RATE, mel_bank(BANDS, RATE))
    assert_close(torch.cat([*frames, rest]), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["s4d_nano", "mamba_nano", "mamba2_nano"])
@pytest.mark.parametrize("size", [1, 7, 160, None])
def test_predictions_equal_those_on_the_whole_sequence(name, size):
    for facts, sample in ((SOUND, torch.rand(500) * 2 - 1), (SERIES, torch.randn(170, 3)), (WAVE, torch.rand(170))):
        model = model_for(name, facts.width)
        stream, kept, so_far = Stream(model, facts, lambda logits: logits), set(), 0
        for chunk in sample.split(sizes_of(len(sample), size)):
            logits = stream.push(chunk)
            kept.add(stream.state.nbytes)
            so_far += len(chunk)
            if so_far == len(sample) or len(kept) == 1:  # the first push, and the last
                with torch.no_grad():
                    whole = model(facts.read(sample[:so_far])[None])
                assert_close(logits, whole, rtol=0, atol=1e-5)
        assert len(kept) == 1


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("s4d_nano", "frozen+gda"),
        ("mamba_nano", "frozen+lda"),
        ("mamba2_nano", "frozen+gda"),
        ("mamba2_nano", "frozen+lda"),
        ("mamba2_nano", "seq"),
    ],
)
def test_a_learner_says_of_a_stream_what_it_says_of_the_whole(name, method):
    options = {"headdim": 16} if name == "mamba2_nano" else {}
    settings = {
        "model": {"options": {"d_model": 16, "n_layer": 1, **options}},
        "train": {"task0": "train" if method == "seq" else "skip", "epochs": 1, "threads": 1, "accelerator": "cpu"},
    }
    learner = Learner(name, method=method, settings=settings)
    rng = np.random.default_rng(0)
    waves = np.sin(np.arange(30)[:, None] * [0.2, 0.4, 0.9]) + 0.3 * rng.normal(size=(40, 30, 3))
    waves[20:] = waves[20:, ::-1] ** 2
    learner.learn(waves.astype(np.float32), ["up"] * 20 + ["down"] * 20)
    sample = np.concatenate([waves[0], waves[21], 3 * waves[1]]).astype(np.float32)
    for size in (1, 7, 160, None):
        stream, end = learner.stream(), 0
        for length in sizes_of(len(sample), size):
            said, end = stream.push(sample[end : end + length]), end + length
            if end in (length, len(sample)):
                whole = learner.predict(sample[:end])
                assert (said.label, said.known) == (whole.label, whole.known)
                assert said.probabilities == pytest.approx(whole.probabilities, abs=1e-5)
                assert said.probability < 0.9  # rounding would show
    learner.learn(waves[:4].astype(np.float32), "new")  # the stream goes on with what it knew
    assert set(stream.push(sample[:5]).probabilities) == {"up", "down"}


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ConfigError, match="use predict"):
        Stream(model_for("mamba_nano", 3), ImageFacts("images", 3), lambda logits: logits)
    with pytest.raises(ConfigError, match="both directions"):
        Stream(create_model("vim_nano", img_size=32), SERIES, lambda logits: logits)
    with pytest.raises(ConfigError, match="use generate"):
        Stream(create_model("mamba_lm_nano"), SERIES, lambda logits: logits)
    with pytest.raises(ConfigError, match="carries a state"):
        Stream(torch.nn.Linear(3, 4), SERIES, lambda logits: logits)
    stream = Stream(model_for("mamba_nano", BANDS), SOUND, lambda logits: logits)
    for chunk in (torch.zeros(0), torch.zeros(5, BANDS), torch.tensor([float("nan")])):
        with pytest.raises(DataError, match=r"must be numbers|NaN"):
            stream.push(chunk)
    images = Learner("vim_nano", settings={"train": {"task0": "skip"}})
    images.learn(np.zeros((4, 8, 8), dtype=np.uint8), "black")
    with pytest.raises(ConfigError, match="use predict"):
        images.stream()


def test_facts_of_sounds_without_a_rate_are_refused() -> None:
    damaged = SoundFacts("sounds", "audio", 1)
    with pytest.raises(DataError, match="have no rate"):
        damaged.hertz  # noqa: B018
    with pytest.raises(DataError, match="have no rate"):
        damaged.read("sound.wav")


def test_a_file_of_several_series_is_not_one_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", x=np.zeros((2, 4, 2)))
    with pytest.raises(DataError, match=r"two\.npz holds 2 series: give one"):
        SequenceFacts("waves", "series", 2).read(tmp_path / "two.npz")
