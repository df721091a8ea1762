"""Mutated tokenizer files, and mutated folders of the datasets library: each is read, or refused with one line."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from infssm.data import load_dataset
from infssm.errors import InfssmError
from tests.fuzz import Tally, attempt, conclude

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 1.5, -1e308, "", "a", "x" * 400, "\ud7ff", "(", "[", "(a+)+$"),
    *([], {}, [[]], [None], {"a": 1}, {"type": "BPE"}, {"type": "Sequence"}, [["a", 0]], "WordLevel", "Image", "Value"),
)
_TEXT = "the quick brown fox — 3 times 😀 " * 40


def run(count: int, seed: int) -> None:
    """Load ``count`` mutated tokenizers and, every fifth case, a mutated ``hf:`` folder: our own errors of one line."""
    rng, tally = random.Random(seed), Tally()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="infssm-fuzz-") as name, _quiet():
        root = Path(name)
        (root / "text" / "a").mkdir(parents=True)
        (root / "text" / "a" / "0.txt").write_text(_TEXT, encoding="utf-8")
        sources = [json.loads(made.to_str()) for made in _tokenizers()]
        folders = list(_folders(root))
        for number in range(count):
            read = _hub_case(root, folders, rng) if number % 5 == 4 else _tokenizer_case(root, sources, rng)
            attempt(tally, f"case {number} of seed {seed}", partial(_one_line, read))
    conclude(tally, "tokenizers")


def _one_line(read: Callable[[], Any]) -> None:
    refusal = ""
    try:
        read()
    except InfssmError as error:
        refusal = str(error)
    assert "\n" not in refusal
    if refusal:
        raise InfssmError(refusal)


def _tokenizers() -> Iterator[Tokenizer]:
    words = Tokenizer(models.WordLevel({"?": 0, "the": 1, "fox": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    yield words
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = Tokenizer(models.BPE({**alphabet, "th": 256, "the": 257}, [("t", "h"), ("th", "e")]))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel()
    pairs.post_processor = processors.TemplateProcessing(single="t $A h", special_tokens=[("t", 5), ("h", 6)])
    pairs.enable_truncation(8)
    pairs.enable_padding(length=9)
    yield pairs
    parts = Tokenizer(models.Unigram([("?", 0.0), ("the", -1.0), ("e", -2.0)], 0, False))
    parts.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "_")])
    yield parts
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "qu": 1, "##ick": 2}, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    yield pieces


def _folders(root: Path) -> Iterator[Path]:
    texts = datasets.Dataset.from_dict({"text": [_TEXT] * 3, "source": ["a", "b", "a"]})
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    images = {"image": [Image.new("RGB", (4, 4), (n, 0, 0)) for n in range(8)], "label": [0, 1] * 4}
    for name, table in (("texts", texts), ("images", datasets.Dataset.from_dict(images, features=kinds))):
        datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(root / name))
        yield root / name


def _tokenizer_case(root: Path, sources: list[Any], rng: random.Random) -> Callable[[], Any]:
    content = json.dumps(_changed(rng.choice(sources), rng)).encode()
    (root / "t.json").write_bytes(_damaged(content, rng) if rng.random() < 0.3 else content)
    return partial(load_dataset, f"text:{root / 'text'}", length=8, tokenizer=str(root / "t.json"))


def _hub_case(root: Path, folders: list[Path], rng: random.Random) -> Callable[[], Any]:
    source = rng.choice(folders)
    shutil.rmtree(root / "case", ignore_errors=True)
    shutil.copytree(source, root / "case")
    file = rng.choice(sorted(path for path in (root / "case").rglob("*") if path.is_file()))
    content = file.read_bytes()
    if file.suffix == ".json" and rng.random() < 0.7:
        content = json.dumps(_changed(json.loads(content), rng)).encode()
    elif rng.random() < 0.1:
        file.unlink()
        content = b""
    else:
        content = _damaged(content, rng)
    if file.exists():
        file.write_bytes(content)
    options = {"text": "text", "length": 8} if source.name == "texts" else {}

    def read() -> None:
        dataset = load_dataset(f"hf:{root / 'case'}", **options)
        if source.name == "images":
            for index in range(len(dataset)):
                dataset.images.pil(index)

    return read


def _changed(value: Any, rng: random.Random) -> Any:
    """A copy with a few values anywhere inside replaced, removed or moved to another place."""
    copy = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 5))):
        places = [
            (node, key) for node in _nodes(copy) for key in (node if isinstance(node, dict) else range(len(node)))
        ]
        if not places:
            break
        node, key = rng.choice(places)
        how = rng.random()
        if how < 0.6:
            node[key] = rng.choice(_VALUES)
        elif how < 0.8:
            del node[key]
        else:
            other, there = rng.choice(places)
            node[key] = json.loads(json.dumps(other[there]))
    return copy


def _nodes(value: Any) -> list[Any]:
    """The value and all lists and mappings inside it; of long ones the first and last few, which see other code."""
    if not isinstance(value, (dict, list)):
        return []
    inner = list(value.values() if isinstance(value, dict) else value)
    return [value, *(node for child in inner[:8] + inner[-8:] for node in _nodes(child))]


def _damaged(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 2, 8))):
        at, how = rng.randrange(max(1, len(changed))), rng.randrange(3)
        if how == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif how == 1:
            del changed[at : at + rng.choice((1, 40, 4000))]
        else:
            changed[at:at] = rng.randbytes(rng.randint(1, 40))
    return bytes(changed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without what a Rust panic writes to the standard error before Python can catch it."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
