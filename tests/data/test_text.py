"""Text: bytes or a tokenizer's tokens, cut into samples; how much memory that takes and what is refused."""

import tracemalloc

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from infssm.data import SequenceLoader, TaskStream, load_dataset, make_split
from infssm.data.sets import text
from infssm.errors import ConfigError, DataError

WORDS = "the quick brown fox jumps over the lazy dog, naïvely — 3 times 😀\n\n"


def byte_pairs():
    """A byte-level BPE that adds a token before and after every text."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([WORDS * 4], trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return made


def folder(root, **domains):
    for domain, content in domains.items():
        (root / "text" / domain).mkdir(parents=True)
        (root / "text" / domain / "0.txt").write_text(content, encoding="utf-8")
    return f"text:{root / 'text'}"


def test_truncation_and_padding_of_a_tokenizer_are_switched_off(tmp_path):
    tokenizer = byte_pairs()
    expected = {d: tokenizer.encode(content).ids for d, content in (("a", WORDS * 40), ("b", "dog " * 100))}
    tokenizer.enable_truncation(max_length=64)
    tokenizer.enable_padding(length=100_000)
    tokenizer.save(str(tmp_path / "t.json"))
    dataset = load_dataset(
        folder(tmp_path, a=WORDS * 40, b="dog " * 100), length=16, tokenizer=str(tmp_path / "t.json")
    )
    found = {domain: [] for domain in "ab"}
    for index, domain in enumerate(dataset.domain_of):
        found["ab"[domain]] += dataset.sequences.sequence(index).tolist()
    assert found == {d: ids[: len(ids) - (len(ids) % 16 == 1)] for d, ids in expected.items()}


def test_long_texts_have_the_tokens_of_the_whole(monkeypatch, tmp_path):
    """Encoded in pieces, they are what the tokenizer makes of the whole text, and no byte is counted twice."""
    monkeypatch.setattr(text, "_PIECE", 8192)
    tokenizer = byte_pairs()
    tokenizer.save(str(tmp_path / "t.json"))
    content = "".join(WORDS.replace("fox", f"fox{n}") for n in range(400))
    encode, _ = text._tokenizer(str(tmp_path / "t.json"))
    pieces = list(encode(content.encode(), "x"))
    assert len(pieces) > 3
    assert np.concatenate([ids for ids, _ in pieces]).tolist() == tokenizer.encode(content).ids
    ends = np.concatenate([ends for _, ends in pieces])
    assert (np.diff(ends) >= 0).all()
    assert ends[-1] == len(content.encode())
    spaceless = ("å" * 9000).encode()
    assert all(spaceless[start:stop].decode() for start, stop in text._pieces(spaceless))


@pytest.mark.parametrize("length", [5, 16, 100])
def test_bytes_behind_the_samples(monkeypatch, tmp_path, length):
    """The predicted tokens of a sample stand for the text from the end of its first token to the end of its last."""
    monkeypatch.setattr(text, "_PIECE", 8192)
    tokenizer = byte_pairs()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor, tokenizer.decoder = processors.ByteLevel(trim_offsets=False), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "t.json"))
    name = folder(tmp_path, a="plain words only " * 2000)
    dataset = load_dataset(name, length=length, tokenizer=str(tmp_path / "t.json"))
    for index, counted in enumerate(dataset.sequences.text_bytes):
        ids = dataset.sequences.sequence(index).tolist()
        assert len(tokenizer.decode(ids[1:])) == counted
    plain = load_dataset(name, length=length)
    assert plain.sequences.text_bytes.tolist() == (plain.sequences.lengths - 1).tolist()


@pytest.mark.parametrize("tokenizer", [False, True])
def test_loading_takes_at_most_4_bytes_per_byte(monkeypatch, tmp_path, tokenizer):
    monkeypatch.setattr(text, "_PIECE", 4096)  # what encoding a piece takes does not count
    byte_pairs().save(str(tmp_path / "t.json"))
    name = folder(tmp_path, a=WORDS * 5000, b=WORDS * 5000)
    size = 10_000 * len(WORDS.encode())
    load_dataset("stdlib-text", limit=2000, tokenizer=str(tmp_path / "t.json"))  # modules are loaded
    tracemalloc.start()
    dataset = load_dataset(name, tokenizer=str(tmp_path / "t.json") if tokenizer else None)
    assert dataset.fingerprint
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3.5 * size


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1, 2", b"\x00\xff", b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": -1}}}'],
)
def test_damaged_tokenizers_are_one_line_errors(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match="cannot read the tokenizer") as raised:
        load_dataset("stdlib-text", limit=2000, tokenizer=str(tmp_path / "t.json"))
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_cannot_encode_is_a_one_line_error(tmp_path):
    """A word-level vocabulary without its unknown token loads, and fails on the first unknown word."""
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"t\.json cannot encode topics: WordLevel error"):
        load_dataset("stdlib-text", limit=2000, tokenizer=str(tmp_path / "t.json"))


def test_ids_beyond_the_number_of_tokens(tmp_path):
    """Vocabularies may have gaps: the model needs an output for the largest id."""
    made = tokenizers.Tokenizer(models.WordLevel({"?": 0, "the": 700}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    dataset = load_dataset(folder(tmp_path, a=WORDS * 20), length=8, tokenizer=str(tmp_path / "t.json"))
    assert dataset.sequences.width == 701


def test_text_folders(tmp_path):
    """Bytes of any kind are text: NULs, invalid UTF-8; samples do not cross files."""
    contents = {"a": [b"0123456789" * 3, b"ABC"], "b": [bytes(range(256)), b"\xff\xfe\x00 not UTF-8"]}
    for domain, files in contents.items():
        (tmp_path / domain).mkdir()
        for number, content in enumerate(files):
            (tmp_path / domain / f"{number}.txt").write_bytes(content)
    dataset = load_dataset(f"text:{tmp_path}", length=8)
    assert (dataset.domains, dataset.classes, dataset.sequences.width) == (("a", "b"), ("text",), 256)
    samples = [bytes(dataset.sequences.sequence(n).tolist()) for n in range(len(dataset))]
    found = {d: [s for s, k in zip(samples, dataset.domain_of, strict=True) if k == n] for n, d in enumerate("ab")}
    for domain, files in contents.items():
        assert b"".join(found[domain]) == b"".join(files)
    assert found["a"] == [b"01234567", b"89012345", b"67890123", b"456789", b"ABC"]
    assert dataset.num_test == 1 + 3
    stream = TaskStream(dataset, make_split(dataset), 2, by="domain")
    x, _ = next(iter(SequenceLoader(stream[1], batch_size=4)))
    assert x.dtype == torch.int64
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no files"):
        load_dataset(f"text:{tmp_path}")
    (tmp_path / "empty" / "short.txt").write_text("ab")
    with pytest.raises(DataError, match=r"makes 1 samples of 8 tokens, and 3 are needed"):
        load_dataset(f"text:{tmp_path}", length=8)
    with pytest.raises(DataError, match="no folder"):
        load_dataset(f"text:{tmp_path / 'absent'}")
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        load_dataset(f"text:{tmp_path}", length=1)


def test_text_through_a_tokenizer_file(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"new": 0, "old": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    for domain in "ab":
        (tmp_path / "text" / domain).mkdir(parents=True)
        (tmp_path / "text" / domain / "0.txt").write_text("old new other " * 6)
    dataset = load_dataset(f"text:{tmp_path / 'text'}", length=3, tokenizer=str(tmp_path / "words.json"))
    assert dataset.sequences.width == 3
    assert dataset.sequences.sequence(0).tolist() == [1, 0, 2]
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_dataset(f"text:{tmp_path / 'text'}", tokenizer=str(tmp_path / "absent.json"))


def test_pythons_own_text_is_four_domains_without_a_download():
    dataset = load_dataset("stdlib-text", limit=20_000)
    assert dataset.domains == ("topics", "source", "html", "names")
    stream = TaskStream(dataset, make_split(dataset), 4, by="domain")
    for task in stream:
        assert min(len(task.train), len(task.val), len(task.test)) >= 5
    first = bytes(dataset.sequences.sequence(int(np.flatnonzero(dataset.domain_of == 3)[0])).tolist())
    assert first.startswith(b"U+0020 SPACE\nU+0021 EXCLAMATION MARK\n")
    everything = bytes(dataset.sequences.tokens.tolist())
    assert b'href="file:' not in everything
    assert b" at 0x" not in everything
    assert load_dataset("stdlib-text", limit=20_000).fingerprint == dataset.fingerprint
