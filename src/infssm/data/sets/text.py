"""Text for language models, a domain after the other: folders of files, or Python's own text."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infssm.data.dataset import Dataset
from infssm.data.registry import register_dataset
from infssm.data.sequences import Tokens
from infssm.errors import ConfigError, DataError

BYTES = 256
_Array = NDArray[np.int64]
_TEST_SHARE = 10
"""The last tenth of every domain is its test set: text beside what was trained on would be too easy."""
_MODULES = (
    *("argparse", "ast", "datetime", "decimal", "difflib", "inspect", "json", "logging", "pathlib", "tarfile"),
    *("tempfile", "threading", "typing", "unittest", "urllib.parse", "urllib.request", "xml.dom.minidom", "zipfile"),
)


def text_folder(path: Path, *, length: int = 256, tokenizer: str | None = None) -> Dataset:
    """A folder with one folder of text files per domain.

    Args:
        path: the folder; every file below a domain's folder is read, sorted by name. Bytes of any kind are text; for
            a tokenizer, files must be UTF-8.
        length: tokens of a sample.
        tokenizer: a file of the ``tokenizers`` library; bytes are the tokens unless given.
    """
    if not path.is_dir():
        raise DataError(f"no folder {path}: give one with a folder of text files per domain")
    domains = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not domains:
        raise DataError(f"{path} holds no folders; expected one folder of text files per domain")
    read = Path.read_bytes if tokenizer is None else _characters
    contents = {domain.name: [read(file) for file in _files(domain)] for domain in domains}
    return text_dataset(path.name, contents, length=length, tokenizer=tokenizer)


@register_dataset("stdlib-text", summary="Python's own text in four domains: topics, source, HTML help, unicode names")
def stdlib_text(root: Path, *, length: int = 256, limit: int = 200_000, tokenizer: str | None = None) -> Dataset:  # noqa: ARG001
    """What every Python brings along, ``limit`` bytes of each domain; it differs between versions of Python."""
    texts = {"topics": _topics, "source": _sources, "html": _html_help, "names": _unicode_names}
    try:
        contents = {name: [_first(text(), limit)] for name, text in texts.items()}
    except (ImportError, OSError) as error:
        raise DataError(f"this Python comes without its documentation or its source: {error}") from error
    return text_dataset("stdlib-text", contents, length=length, tokenizer=tokenizer)


def text_dataset(
    name: str, contents: dict[str, list[bytes]], *, length: int = 256, tokenizer: str | None = None
) -> Dataset:
    """A data set of token sequences from the files of each domain; samples do not cross files."""
    if length < 2:
        raise ConfigError(f"a sample needs at least 2 tokens to predict one, got a length of {length}")
    encode, vocabulary = _tokenizer(tokenizer)
    parts: dict[bool, list[tuple[int, _Array]]] = {False: [], True: []}
    for domain, files in enumerate(contents.values()):
        samples = [chunk for content in files for chunk in _cut(encode(content), length)]
        if len(samples) < 3:
            raise DataError(
                f"{name}: the text of {list(contents)[domain]} makes {len(samples)} samples of {length} tokens, and 3 "
                "are needed: add text, or choose a smaller length"
            )
        first_test = len(samples) - max(1, len(samples) // _TEST_SHARE)
        for number, sample in enumerate(samples):
            parts[number >= first_test].append((domain, sample))
    ordered = parts[False] + parts[True]
    return Dataset(
        name,
        ("text",),
        Tokens(np.concatenate([s for _, s in ordered]), [len(s) for _, s in ordered], vocabulary),
        np.zeros(len(ordered), dtype=np.int64),
        num_test=len(parts[True]),
        stratified=True,
        running=True,
        domains=tuple(contents),
        domain_of=np.array([domain for domain, _ in ordered]),
    )


def _cut(tokens: _Array, length: int) -> list[_Array]:
    """Stretches of ``length``; a last, shorter one is kept where it has at least 2 tokens."""
    stretches = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [stretch for stretch in stretches if len(stretch) >= 2]


def _tokenizer(path: str | None) -> tuple[Callable[[bytes], _Array], int]:
    """A function from bytes to tokens int64 [n], and the size of its vocabulary."""
    if path is None:
        return lambda content: np.frombuffer(content, np.uint8).astype(np.int64), BYTES
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("a tokenizer file needs the tokenizers library: pip install 'infssm[hf]'") from error
    try:
        loaded = Tokenizer.from_file(str(Path(path).expanduser()))
    except Exception as error:
        raise DataError(f"cannot read the tokenizer {path}: {error}") from error

    def encode(content: bytes) -> _Array:
        return np.array(loaded.encode(content.decode("utf-8", "replace")).ids, dtype=np.int64)

    return encode, int(loaded.get_vocab_size())


def _characters(path: Path) -> bytes:
    """A file for a tokenizer, which reads characters: bytes that are none would become others without a word."""
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {error.start + 1:,} belongs to no character; convert the file (iconv -t utf-8) "
            "or leave the tokenizer out, so that bytes are the tokens"
        ) from error
    return content


def _files(folder: Path) -> Iterable[Path]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"the domain {folder} holds no files")
    return files


def _first(parts: Iterable[str], limit: int) -> bytes:
    """The first ``limit`` bytes of texts one after the other."""
    content = b""
    for part in parts:
        content += part.encode("utf-8", "replace")
        if len(content) >= limit:
            break
    return content[:limit]


def _topics() -> Iterable[str]:
    topics = importlib.import_module("pydoc_data.topics").topics
    return (topics[name] for name in sorted(topics))


def _sources() -> Iterable[str]:
    import inspect

    return (inspect.getsource(importlib.import_module(name)) for name in _MODULES)


def _html_help() -> Iterable[str]:
    """pydoc's pages, without the places on this machine that they link to, and without what changes between runs."""
    import pydoc

    for name in _MODULES:
        page = pydoc.HTMLDoc().docmodule(importlib.import_module(name))
        page = page.partition("<strong>Data</strong>")[0]  # after it, values of this process, sets in any order
        yield re.sub(r'<a href="file:[^"]*">.*?</a>| at 0x[0-9a-fA-F]+', "", page)


def _unicode_names() -> Iterable[str]:
    import unicodedata

    for code in range(sys.maxunicode):
        if name := unicodedata.name(chr(code), ""):
            yield f"U+{code:04X} {name}\n"
