"""Runs on series, sounds and language: what is measured, what is refused, and that padding counts nowhere."""

from __future__ import annotations

import itertools
import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, pre_tokenizers

import infssm
from infssm._batch import IGNORED, Batch, next_tokens
from infssm.bench.reports.report import render_report
from infssm.bench.running import resume, run, run_path
from infssm.data import Tokens, load_dataset
from infssm.errors import ConfigError, DataError
from infssm.integrations import mend_torchvision
from infssm.learner.evaluate import evaluate_run
from infssm.learner.events import Interrupted
from infssm.learner.lessons import bits_of
from infssm.learner.metrics import AccuracyMatrix
from infssm.learner.scoring import Bits
from infssm.learner.setup import build, load_weights
from infssm.learner.store.directory import RunDirectory
from infssm.methods import build_method
from infssm.models import create_model
from tests.data.test_audio import write_wav
from tests.learner.sequences import config, series_file, sound_folder, text_folder
from tests.learner.test_resume import broken_at, signalled
from tests.learner.tiny import assert_same

EXACT = {"inf-ssm-exact": {"weight": 10.0}}
METHODS = ["seq", "frozen", "joint", "er", "si", "lwf", "lwf-f", "lwf-ac", "lwf+inf-ssm-exact", "er+lwf-ac"]
SELF = {"sequences": 6, "replay_batch": 3, "length": 8, "refresh": 2}


def options_of(method: str) -> dict[str, Any]:
    found: dict[str, Any] = EXACT if "inf-ssm-exact" in method else {}
    found = found | ({"er": {"buffer_size": 6}} if method.startswith("er") else {})
    return found | ({"self-replay": SELF} if "self-replay" in method else {})


@pytest.mark.parametrize("method", [*METHODS, "self-replay", "er+self-replay+lwf-ac"])
def test_every_method_that_takes_language_runs_on_it(tmp_path: Path, method: str) -> None:
    found = run(config(f"text:{text_folder(tmp_path)}", tmp_path, method, options_of(method)), quiet=True)
    values = found.matrix.all_values
    assert values.shape == (2, 2)
    assert np.isfinite(values).all()
    assert (values > 0).all()
    assert (values < 10).all()  # untrained: 8 bits


def test_bits_are_those_of_the_saved_models(tmp_path: Path) -> None:
    """Against a computation of its own: samples one by one, float64, no mask."""
    chosen = config(f"text:{text_folder(tmp_path)}", tmp_path)
    found = run(chosen, quiet=True)
    setup = build(chosen, torch.device("cpu"), weights=False)
    stream, expected = setup.stream, np.zeros((2, 2))
    for step in range(2):
        load_weights(setup.method, RunDirectory(found.path).weights_path(step))
        model = setup.method.module.double().eval()
        for task in stream:
            bits, count = 0.0, 0
            for index in task.test.indices[
                np.argsort(stream.dataset.sequences.lengths[task.test.indices], kind="stable")
            ][:24]:
                tokens = stream.dataset.sequences.sequence(int(index))
                with torch.no_grad():
                    shares = model(tokens[None])[0].log_softmax(-1) / math.log(2)
                bits -= sum(float(shares[t, tokens[t + 1]]) for t in range(len(tokens) - 1))
                count += len(tokens) - 1
            expected[step, task.index] = bits / count
        setup.method.module.float()
    np.testing.assert_allclose(found.matrix.all_values, expected, rtol=1e-4)
    assert found.matrix.quantity.key == "bits_per_byte"
    lost = expected[1, 0] - min(expected[0, 0], expected[1, 0])
    assert found.fm == pytest.approx(lost, abs=1e-3)
    assert found.matrix.bwt == pytest.approx(expected[0, 0] - expected[1, 0], abs=1e-3)
    assert found.matrix.fwt == pytest.approx(8 - expected[0, 1], abs=1e-3)


def test_bytes_are_those_of_the_part_that_is_scored(tmp_path: Path) -> None:
    """The parts of a task may be of different data sets, as where a learner is taught and tested on two."""
    setup = build(config(f"text:{text_folder(tmp_path)}", tmp_path), torch.device("cpu"), weights=False)
    task, dataset = setup.stream[0], setup.stream.dataset
    tokens = cast(Tokens, dataset.samples)
    longer = Tokens(tokens.tokens, tokens.lengths, 256, 3 * (tokens.lengths - 1))
    task = replace(task, val=replace(task.val, dataset=replace(dataset, samples=longer)))
    one, three = (bits_of(setup, task, part) for part in ("test", "val"))
    assert one.bytes == one.tokens
    assert three.bytes == 3 * three.tokens


def test_what_a_run_on_language_leaves_behind(tmp_path: Path) -> None:
    found = run(config(f"text:{text_folder(tmp_path)}", tmp_path), quiet=True)
    directory = RunDirectory(found.path)
    page = render_report(directory)
    assert "Bits per byte after each task" in page
    assert "forward transfer, bits" in page
    assert directory.confusion() is None
    assert directory.names_per_task() == [("digits",), ("letters",)]
    assert json.loads((found.path / "result.json").read_text())["matrix"]["measure"] == "bits_per_byte"
    rows = evaluate_run(found.path)
    assert [row.value for row in rows] == pytest.approx(found.matrix.values[1].tolist(), rel=1e-6)
    bits = cast(Bits, rows[0])
    assert bits.bits_per_byte == bits.bits_per_token == pytest.approx(math.log2(bits.perplexity))
    assert bits.bytes == bits.tokens
    with pytest.raises(ConfigError, match="infssm eval"):
        infssm.load(found.path)


def test_bits_per_byte_and_per_token_with_any_tokenizer(tmp_path: Path) -> None:
    """A vocabulary of 256 words is no vocabulary of bytes: bytes of the text are counted."""
    words = ["?", "fox", "jumps", *(f"w{n}" for n in range(253))]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    for domain in ("a", "b"):
        (tmp_path / "text" / domain).mkdir(parents=True)
        (tmp_path / "text" / domain / "0.txt").write_text(f"fox jumps {domain * 17}\n" * 300)
    options = {"data": {"options": {"length": 3, "tokenizer": str(tmp_path / "words.json")}}}
    found = run(config(f"text:{tmp_path / 'text'}", tmp_path, **options), quiet=True)
    assert found.matrix.quantity.key == "bits_per_byte"
    # of every 3 tokens "fox jumps aa…" the last two are predicted: 2 tokens for " jumps aaaaaaaaaaaaaaaaa", 24 bytes
    rows = [cast(Bits, row) for row in evaluate_run(found.path)]
    for row, stored in zip(rows, found.matrix.values[1], strict=True):
        assert row.bytes == 12 * row.tokens
        assert row.bits_per_token == pytest.approx(12 * row.bits_per_byte)
        assert stored == pytest.approx(row.bits_per_byte, rel=1e-6)
    assert found.matrix.bits_per_token == pytest.approx(12 * found.aa)
    assert found.matrix.to_json()["ahead"][0] == pytest.approx([8 / 12] * 2)  # guessing: 8 bits per token
    again = AccuracyMatrix.from_csv(found.matrix.to_csv())
    assert again.bits_per_token == found.matrix.bits_per_token
    stored_result = json.loads((found.path / "result.json").read_text())
    assert stored_result["bits_per_token"] == pytest.approx(12 * stored_result["aa"])
    page = render_report(RunDirectory(found.path))
    assert "Bits per byte after each task" in page
    assert "bits per token" in page
    assert f"{2**found.matrix.bits_per_token:.2f}" in page


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *itertools.product(["er", "lwf+inf-ssm-exact", "frozen"], ["text", "series"]),
        ("self-replay+inf-ssm-exact", "text"),
    ],
)
def test_interrupted_and_resumed_is_bit_exact(tmp_path: Path, method: str, kind: str) -> None:
    data = f"text:{text_folder(tmp_path)}" if kind == "text" else str(series_file(tmp_path))
    whole = run(config(data, tmp_path / "whole", method, options_of(method)), quiet=True)
    broken = config(data, tmp_path / "broken", method, options_of(method))
    for step in (2, 8):
        with broken_at(step, signalled), pytest.raises(Interrupted):
            run(broken, quiet=True)
    assert_same(resume(run_path(broken), quiet=True), whole)


@pytest.mark.parametrize("model", ["mamba_nano", "mamba2_nano", "s4d_nano"])
@pytest.mark.parametrize("by", ["class", "domain"])
def test_series_by_class_and_by_domain(tmp_path: Path, model: str, by: str) -> None:
    changes = {"data": {"by": by}, "model": {"name": model, "options": {"d_model": 16, "n_layer": 1}}}
    chosen = config(str(series_file(tmp_path)), tmp_path, "inf-ssm-exact", {"measure_at": 2}, **changes)
    found = run(chosen, quiet=True)
    assert found.matrix.of_domains == (by == "domain")
    assert len(infssm.load(found.path, task=0).classes) == (4 if by == "domain" else 2)
    assert RunDirectory(found.path).confusion() is not None


def test_predictions_are_those_of_the_evaluation(tmp_path: Path) -> None:
    """Of sounds in bands by file, all in one padded batch."""
    changes = {"data": {"name": f"domains:{sound_folder(tmp_path)}", "bands": 8}}
    found = run(config("sounds", tmp_path, **changes), quiet=True)
    classifier = infssm.load(found.path)
    setup = build(found.config, torch.device("cpu"))
    load_weights(setup.method, found.weights)
    files, right, images = setup.stream.dataset.sequences.sounds, 0, 0  # type: ignore[attr-defined]
    for task in setup.stream:
        said = classifier.predict([files.root / files.paths[i] for i in task.test.indices])
        right = sum(
            classifier.classes.index(p.label) == y for p, y in zip(said, task.test.labels.tolist(), strict=True)
        )
        assert right / len(said) == pytest.approx(found.matrix.values[1, task.index])
        images += len(said)
    assert images == int(found.matrix.class_incremental.samples.sum())
    with pytest.raises(DataError, match="numbers"):
        classifier.predict(np.zeros((3, 5)))


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("ewc", {}, "'ewc' does not work on language; these do: .*lwf"),
        ("lda", {}, "'lda' does not work on language"),
        ("der", {}, "'der' does not work on language"),
        (
            "seq",
            {"model": {"name": "vim_nano", "options": {}}},
            "for images, and text is language: choose.*mamba_lm_nano",
        ),
        ("seq", {"model": {"name": "s4d_nano", "options": {}}}, "for regression and series"),
        ("seq", {"data": {"by": "speaker"}}, "makes tasks by class or domain"),
        ("seq", {"data": {"bands": 8}}, "data.bands is for audio"),
        ("seq", {"train": {"label_smoothing": 0.1}}, "not mixed or smoothed"),
    ],
)
def test_what_cannot_be_is_refused_before_work_starts(
    tmp_path: Path, method: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(config(f"text:{text_folder(tmp_path)}", tmp_path, method, **changes), torch.device("cpu"))


@pytest.mark.parametrize("method", ["lucir", "x-der"])
def test_methods_of_new_classes_are_refused_on_domains(tmp_path: Path, method: str) -> None:
    chosen = config(str(series_file(tmp_path)), tmp_path, method)
    with pytest.raises(ConfigError, match=f"'{method}' does not work on series"):
        build(chosen, torch.device("cpu"))


def bad_sound(path: Path, kind: str) -> None:
    if kind == "text":
        path.write_text("not a sound")
    elif kind == "empty":
        write_wav(path, np.zeros(0), rate=8000)
    else:
        header = struct.pack(
            "<4sI4s4sIHHIIHH4sI", b"RIFF", 44, b"WAVE", b"fmt ", 16, 2, 1, 8000, 32000, 4, 32, b"data", 8
        )
        path.write_bytes(header + bytes(8))


@pytest.mark.parametrize("kind", ["text", "empty", "compressed"])
def test_bad_sounds_stop_a_run_or_are_left_out(tmp_path: Path, kind: str) -> None:
    folder = sound_folder(tmp_path)
    bad_sound(folder / "ann" / "no" / "bad.wav", kind)
    chosen = config(f"domains:{folder}", tmp_path, data={"bands": 8})
    with pytest.raises(DataError, match=r"bad\.wav"):
        run(chosen, quiet=True)
    with pytest.warns(UserWarning, match="1 files cannot be read"):
        found = run(config(f"domains:{folder}", tmp_path, data={"bands": 8, "skip_unreadable": True}), quiet=True)
    assert np.isfinite(found.matrix.all_values).all()


def batch_of(kind: str, length: int, padding: int, *, dtype: torch.dtype = torch.float64) -> Batch:
    """Three rows of one length, as they are or with steps of noise after their end that the mask leaves out."""
    rng = torch.Generator().manual_seed(length)
    total, mask = length + padding, torch.arange(length + padding).expand(3, -1) < length
    if kind == "language":
        x = torch.randint(256, (3, total), generator=torch.Generator().manual_seed(1))
        x[:, :length] = torch.randint(256, (3, length), generator=rng)
        return Batch(x, next_tokens(x, mask), mask=mask)
    x = torch.randn(3, total, 2, generator=torch.Generator().manual_seed(1), dtype=dtype)
    x[:, :length] = torch.randn(3, length, 2, generator=rng, dtype=dtype)
    return Batch(x, torch.tensor([0, 1, 2]), mask=mask)


@pytest.mark.parametrize("method", ["lwf+lwf-ac+inf-ssm-exact", "lwf-f", "er", "frozen"])
@pytest.mark.parametrize("model", ["mamba_lm_nano", "mamba2_lm_nano", "mamba_nano", "mamba2_nano", "s4d_nano"])
def test_padding_counts_neither_in_loss_nor_in_penalty(model: str, method: str) -> None:
    """The old model is another one, so that the penalties are not zero."""
    kind = "language" if "_lm_" in model else "series"
    sizes = {"vocab_size": 256} if kind == "language" else {"in_dim": 2, "num_classes": 3}
    torch.manual_seed(0)
    learner = create_model(model, d_model=32, n_layer=2, **sizes).double()
    built = build_method(learner, method, data_kind=kind, domains=True, **options_of(method))
    first = batch_of(kind, 9, 0)
    built.begin_task(0)
    built.loss(first)
    built.after_step()
    built.end_task(0, [first])
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, dtype=parameter.dtype))
    found = []
    for padding in (0, 5):
        built.begin_task(1)
        if method == "er":
            built.base.buffer.generator.manual_seed(0)  # type: ignore[attr-defined]
        terms = built.loss(batch_of(kind, 9, padding))
        learner.zero_grad()
        sum(terms.values(), start=torch.zeros(())).backward()
        gradient = torch.cat([p.grad.flatten() for p in learner.parameters() if p.grad is not None])
        found.append(({name: float(value.detach()) for name, value in terms.items()}, gradient))
    (plain, grad), (padded, padded_grad) = found
    assert padded == pytest.approx(plain, rel=1e-6)
    assert all(value > 0 for value in plain.values())
    assert float((padded_grad - grad).norm() / grad.norm()) < 1e-6


def test_next_tokens_are_what_follows() -> None:
    x = torch.tensor([[5, 6, 7, 0], [1, 2, 3, 4]])
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    assert next_tokens(x, mask).tolist() == [[6, 7, IGNORED, IGNORED], [2, 3, 4, IGNORED]]


def test_a_model_of_transformers_by_folder(tmp_path: Path) -> None:
    mend_torchvision()
    transformers = pytest.importorskip("transformers")
    small = transformers.MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = transformers.MambaForCausalLM(small).eval()
    model.save_pretrained(tmp_path / "tiny-mamba")
    text = f"text:{text_folder(tmp_path)}"
    changes = {"model": {"name": f"hf:{tmp_path / 'tiny-mamba'}", "options": {}}}
    chosen = config(text, tmp_path, "lwf+inf-ssm-exact", EXACT, **changes)
    setup = build(chosen, torch.device("cpu"))
    batch = next(iter(setup.train_loader(setup.stream[0], 0)))
    with torch.no_grad():
        theirs = model(batch.x, labels=batch.x.masked_fill(~batch.mask, -100)).loss  # type: ignore[operator]
        ours = F.cross_entropy(setup.method.module(batch.x).flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-4)
    found = run(chosen, quiet=True)
    assert found.path.parent.name == "tiny-mamba"
    assert np.isfinite(found.matrix.all_values).all()


def test_stdlib_text_is_a_language_stream_everywhere() -> None:
    dataset = load_dataset("stdlib-text", length=64, limit=4000)
    assert dataset.modality.name == "language"
    assert dataset.facts.width == 256  # type: ignore[union-attr]
