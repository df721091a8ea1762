"""Text for language models, one domain after another: folders of files, or Python's own text."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infssm.data.dataset import Dataset, register_dataset
from infssm.data.sequences import BYTES, Tokens, token_type
from infssm.errors import ConfigError, DataError

_Piece = tuple[NDArray[Any], NDArray[np.int64]]
_Encode = Callable[[bytes, str], Iterator[_Piece]]
_TEST_SHARE = 10
"""The last tenth of every domain is its test set: text beside what was trained on would be too easy."""
_PIECE = 1 << 18
"""Bytes encoded at a time. A tokenizer needs about 200 bytes per token for its result, so whole files would not fit."""
_SPACE = re.compile(rb"[A-Za-z0-9](?= [A-Za-z0-9])")
_MAX_VOCABULARY = 1 << 24
"""Bound on token ids: the largest public vocabularies have about 2**18 tokens."""
_MODULES = (
    *("argparse", "ast", "datetime", "decimal", "difflib", "inspect", "json", "logging", "pathlib", "tarfile"),
    *("tempfile", "threading", "typing", "unittest", "urllib.parse", "urllib.request", "xml.dom.minidom", "zipfile"),
)


class Text(NamedTuple):
    """One file or row of text: its domain, its content, what to call it in errors, and its official part."""

    domain: str
    content: bytes
    source: str
    test: bool = False


class _Samples(NamedTuple):
    """Samples of one text: ``tokens: [total]``, ``lengths`` and ``text_bytes: int64 [n]`` (see :class:`Tokens`)."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    text_bytes: NDArray[np.int64]


def text_folder(path: Path, *, length: int = 256, tokenizer: str | None = None) -> Dataset:
    """A folder with one folder of text files per domain, or with the files of a single domain.

    Args:
        path: the folder; every file below a domain's folder is read, sorted by name. Without a tokenizer, files may
            hold any bytes; with one they must be UTF-8.
        length: tokens per sample.
        tokenizer: a file of the ``tokenizers`` library (``tokenizer.json``); its truncation and padding are switched
            off. Bytes are the tokens unless given.
    """
    if not path.is_dir():
        raise DataError(f"no folder {path}: give one with a folder of text files per domain")
    files: list[tuple[str, Path]] = []
    domains = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not domains and any(entry.is_file() and not entry.name.startswith(".") for entry in path.iterdir()):
        domains = [path]
    for domain in domains:
        below = sorted(file for file in domain.rglob("*") if file.is_file() and not file.name.startswith("."))
        if not below:
            raise DataError(f"the domain {domain} holds no files")
        files += [(domain.name, file) for file in below]
    if not files:
        raise DataError(f"{path} holds no folders; expected one folder of text files per domain")
    texts = (Text(domain, file.read_bytes(), str(file)) for domain, file in files)
    return text_dataset(path.name, texts, length=length, tokenizer=tokenizer)


@register_dataset("stdlib-text", summary="Python's own text in four domains: topics, source, HTML help, unicode names")
def stdlib_text(root: Path, *, length: int = 256, limit: int = 200_000, tokenizer: str | None = None) -> Dataset:  # noqa: ARG001
    """Text that comes with every Python, ``limit`` bytes of each domain; it differs between versions of Python."""
    contents = dict.fromkeys(("topics", "source", "html", "names"), b"")
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
        modules = [importlib.import_module(name) for name in _MODULES]
        sources: dict[str, Iterable[str]] = {
            "topics": (topics[topic] for topic in sorted(topics)),
            "source": map(inspect.getsource, modules),
            "html": map(_html_help, modules),
            "names": (f"U+{c:04X} {n}\n" for c in range(sys.maxunicode) if (n := unicodedata.name(chr(c), ""))),
        }
        for name, parts in sources.items():
            while len(contents[name]) < limit and (part := next(iter(parts), None)) is not None:
                contents[name] += part.encode("utf-8", "replace")
    except (ImportError, OSError) as error:
        raise DataError(f"this Python comes without its documentation or its source: {error}") from error
    contents = {name: content[:limit] for name, content in contents.items()}
    if tokenizer is not None:  # the limit may have cut a character in two
        contents = {name: content.decode("utf-8", "replace").encode() for name, content in contents.items()}
    texts = (Text(name, content, name) for name, content in contents.items())
    return text_dataset("stdlib-text", texts, length=length, tokenizer=tokenizer, domains=tuple(contents))


def _html_help(module: ModuleType) -> str:
    """pydoc's page of a module, without links to files of this machine and without what changes between runs."""
    page = pydoc.HTMLDoc().docmodule(module)
    page = page.partition("<strong>Data</strong>")[0]  # after it, values of this process, sets in any order
    return re.sub(r'<a href="file:[^"]*">.*?</a>| at 0x[0-9a-fA-F]+', "", page)


def text_dataset(
    name: str,
    texts: Iterable[Text],
    *,
    length: int = 256,
    tokenizer: str | None = None,
    domains: Sequence[str] | None = None,
) -> Dataset:
    """A data set of token sequences; samples do not cross texts.

    Texts are encoded as they arrive and only their tokens are kept, so a generator needs little more memory than the
    tokens themselves. Where texts are marked as official test data, exactly those are the test set; else the last tenth
    of each domain is.

    Args:
        name: name of the data set.
        texts: the texts, in order within their domain.
        length: tokens per sample; a shorter last sample of a text is kept if it has at least 2 tokens.
        tokenizer: see :func:`text_folder`.
        domains: order of the domains; sorted by name unless given.
    """
    if length < 2:
        raise ConfigError(f"a sample needs at least 2 tokens to predict one, got a length of {length}")
    encode, vocabulary = _tokenizer(tokenizer)
    parts: dict[bool, dict[str, list[_Samples]]] = {False: {}, True: {}}
    for domain, content, source, test in texts:
        parts[test].setdefault(domain, []).append(_cut(encode(content, source), length, token_type(vocabulary)))
    names = tuple(domains or sorted(parts[False] | parts[True]))
    official = bool(parts[True])
    train, test_part = [], []
    for domain in names:
        samples = [_joined(parts[test].pop(domain, []), token_type(vocabulary)) for test in (False, True)]
        count = len(samples[0].lengths)
        if count + len(samples[1].lengths) < 3:
            raise DataError(
                f"{name}: the text of {domain} makes {count + len(samples[1].lengths)} samples of {length} tokens, and "
                "3 are needed: add text, or choose a smaller length"
            )
        first_test = count if official else count - max(1, count // _TEST_SHARE)
        tokens, lengths, text_bytes = samples[0]
        end = int(lengths[:first_test].sum())
        train.append(_Samples(tokens[:end], lengths[:first_test], text_bytes[:first_test]))
        rest = _Samples(tokens[end:], lengths[first_test:], text_bytes[first_test:])
        test_part.append(samples[1] if official else rest)
    joined = _joined([*train, *test_part], token_type(vocabulary))
    return Dataset(
        name,
        ("text",),
        Tokens(joined.tokens, joined.lengths, vocabulary, joined.text_bytes),
        np.zeros(len(joined.lengths), dtype=np.int64),
        num_test=sum(len(part.lengths) for part in test_part),
        stratified=True,
        running=True,
        domains=names,
        domain_of=np.repeat(np.tile(np.arange(len(names)), 2), [len(part.lengths) for part in (*train, *test_part)]),
    )


def _joined(parts: Sequence[_Samples], dtype: type[np.integer[Any]]) -> _Samples:
    if not parts:
        return _Samples(np.empty(0, dtype), np.empty(0, np.int64), np.empty(0, np.int64))
    if len(parts) == 1:
        return parts[0]
    return _Samples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _cut(pieces: Iterable[_Piece], length: int, dtype: type[np.integer[Any]]) -> _Samples:
    """Cut a text into samples of ``length`` tokens and count the bytes that the predicted tokens of each stand for.

    A model predicts all tokens of a sample but the first, so the bytes run from the end of the first token to the end
    of the last one. Only these two ends are kept: the ends of all tokens would take 8 bytes per token.
    """
    tokens, first, last = [np.empty(0, dtype)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    done = end = 0
    for piece, ends in pieces:
        tokens.append(piece.astype(dtype))
        first.append(ends[-done % length :: length].copy())  # a view would keep all ends
        last.append(ends[(length - 1 - done) % length :: length].copy())
        done, end = done + len(piece), int(ends[-1]) if len(ends) else end
    whole, rest = divmod(done, length)
    lengths = np.full(whole, length, dtype=np.int64)
    if rest >= 2:
        lengths, last = np.append(lengths, rest), [*last, np.array([end])]
    kept = done - (rest == 1)
    return _Samples(
        np.concatenate(tokens)[:kept], lengths, np.concatenate(last) - np.concatenate(first)[: len(lengths)]
    )


def open_tokenizer(path: str) -> Any:
    """The tokenizer of a file of the ``tokenizers`` library, which neither truncates nor pads."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("a tokenizer file needs the tokenizers library: pip install 'infssm[hf]'") from error
    file = Path(path).expanduser()
    if not file.is_file():  # a named pipe would block for ever
        raise DataError(f"cannot read the tokenizer {path}: there is no such file")
    with _one_line_errors(f"cannot read the tokenizer {path}"):
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _tokenizer(path: str | None) -> tuple[_Encode, int]:
    """A function from the bytes of a text to pieces of its tokens, and the size of the vocabulary.

    Each piece is ``(tokens [n], ends int64 [n])``, where ``ends`` holds the position in the text, in bytes, up to which
    the tokens so far account for it.
    """
    if path is None:
        return _bytes, BYTES
    tokenizer = open_tokenizer(path)
    with _one_line_errors(f"cannot read the tokenizer {path}"):
        # Ids may have gaps, so that the largest one can exceed the number of tokens.
        vocabulary = max(int(tokenizer.get_vocab_size()), 1 + max(tokenizer.get_vocab().values(), default=0))
    if vocabulary > _MAX_VOCABULARY:
        raise DataError(f"cannot read the tokenizer {path}: token ids up to {vocabulary - 1:,} are not plausible")

    def encode(content: bytes, source: str) -> Iterator[_Piece]:
        done = 0
        for start, stop in _pieces(content):
            try:
                text = content[start:stop].decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{source} is not UTF-8: byte {start + error.start + 1:,} belongs to no character; convert the "
                    "file (iconv -t utf-8) or leave the tokenizer out, so that bytes are the tokens"
                ) from error
            with _one_line_errors(f"the tokenizer {path} cannot encode {source}"):
                encoding = tokenizer.encode(text)
                ids, added = np.array(encoding.ids, np.int64), np.array(encoding.special_tokens_mask, bool)
                characters = np.fromiter((end for _, end in encoding.offsets), np.int64, len(ids))
                codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
                sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
                ends = start + np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[characters]  # in UTF-8
            # Tokens that the tokenizer adds around a text belong around the whole text, not around each piece.
            own = np.flatnonzero(~added)
            low = 0 if start == 0 else own[0] if len(own) else len(ids)
            high = len(ids) if stop == len(content) else own[-1] + 1 if len(own) else low
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
                raise DataError(f"the tokenizer {path} gives ids outside its vocabulary of {vocabulary:,} tokens")
            # Added tokens have the offsets (0, 0); several tokens may share a character.
            ends = np.maximum.accumulate(np.maximum(ends[low:high], done))
            done = int(ends[-1]) if len(ends) else done
            yield ids[low:high], ends

    return encode, vocabulary


def _bytes(content: bytes, source: str) -> Iterator[_Piece]:  # noqa: ARG001 - any bytes are text
    """The bytes themselves as tokens."""
    for start in range(0, len(content), _PIECE):
        tokens = np.frombuffer(content, np.uint8, min(_PIECE, len(content) - start), start)
        yield tokens, np.arange(start + 1, start + 1 + len(tokens))


def _pieces(content: bytes) -> Iterator[tuple[int, int]]:
    """Bounds of pieces of at most 256 KiB, in bytes.

    A piece ends before a space between two letters or digits: tokenizers split there anyway, so that the pieces have
    the tokens of the whole text. Where there is no such space nearby, it ends at any character.
    """
    start = 0
    while len(content) - start > _PIECE:
        stop = start + _PIECE
        spaces = [match.end() for match in _SPACE.finditer(content, stop - 4096, stop)]
        if spaces:
            stop = spaces[-1]
        else:
            while content[stop] & 0xC0 == 0x80 and stop > start + _PIECE - 4:  # inside a character of UTF-8
                stop -= 1
        yield start, stop
        start = stop
    if start < len(content):
        yield start, len(content)


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Raise whatever the tokenizers library raises as a DataError; its Rust panics derive from BaseException."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The message of another library's error, or its type where it has none, in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__
