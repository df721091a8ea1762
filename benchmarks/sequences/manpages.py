"""Manual pages in several languages as text, a folder per language: a stream for ``text:FOLDER``.

    python -m benchmarks.sequences.manpages --out FOLDER

With ``--vocabulary`` also ``FOLDER/tokenizer.json``: byte pairs merged on the first four fifths of every language.
Takes Debian's packages ``manpages`` and ``manpages-XX`` by ``apt-get download`` (nothing is installed), leaves out
the lines and marks of the type-setter, and keeps the first pages up to a number of bytes of each language.
"""

from __future__ import annotations

import argparse
import gzip
import re
import subprocess
import tempfile
from pathlib import Path

PACKAGES = {"en": "manpages", **{language: f"manpages-{language}" for language in ("de", "fr", "es", "it", "pl")}}
_MARKS = re.compile(r"\\f(\(..|\[[^]]*\]|.)|\\[&%/,|^]|\\s[-+]?\d")
_SIGNS = {r"\-": "-", r"\(aq": "'", r"\(dq": '"', r"\(co": "(c)", r"\(bu": "*", r"\(en": "-", r"\e": "\\", r"\ ": " "}


def plain_text(page: str) -> str:
    """A page without the type-setter's commands: lines that begin with a dot, comments, marks of fonts."""
    lines = (line for line in page.splitlines() if not line.startswith((".", "'", r"\"")))
    text = _MARKS.sub("", "\n".join(lines))
    for sign, meant in _SIGNS.items():
        text = text.replace(sign, meant)
    return text


def pages(package: str, folder: Path) -> list[Path]:
    """Download and unpack a package; its pages, sorted by name."""
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
    archive = next(folder.glob(f"{package}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", archive.name, package], cwd=folder, check=True)
    return sorted((folder / package).glob("usr/share/man/**/man[57]/*.gz"))


def train_tokenizer(texts: list[bytes], vocabulary: int, path: Path) -> None:
    """Merge pairs of bytes until there are ``vocabulary`` tokens; the last fifth of a text is left out, as it tests."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text[: len(text) * 4 // 5].decode("utf-8", "ignore") for text in texts], trainer)
    tokenizer.save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--bytes", type=int, default=100_000, help="text of each language")
    parser.add_argument("--vocabulary", type=int, help="train a tokenizer of so many tokens, too")
    parser.add_argument("--languages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    args = parser.parse_args()
    texts = []
    for language in args.languages:
        package = PACKAGES[language]
        content = b""
        with tempfile.TemporaryDirectory() as folder:
            for page in pages(package, Path(folder)):
                text = plain_text(gzip.decompress(page.read_bytes()).decode("utf-8", "replace")).encode()
                content += text if len(text) > 1000 else b""  # shorter ones only refer to another page
                if len(content) >= args.bytes:
                    break
        place = args.out / language
        place.mkdir(parents=True, exist_ok=True)
        # A tokenizer needs whole characters.
        texts.append(
            content[: args.bytes].decode("utf-8", "ignore").encode() if args.vocabulary else content[: args.bytes]
        )
        (place / "pages.txt").write_bytes(texts[-1])
    if args.vocabulary:
        train_tokenizer(texts, args.vocabulary, args.out / "tokenizer.json")


if __name__ == "__main__":
    main()
