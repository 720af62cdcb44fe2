# SPDX-License-Identifier: Apache-2.0
"""The corpus of the demo checkpoints: the standard library sources of one CPython release.

Everything here is deterministic and does not depend on the Python that runs the training: the
files of the corpus, the held-out files, the tokenizer, and the prompts cut from held-out files.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CPYTHON_VERSION = "3.13.0"
CORPUS_FILES = 1724
CORPUS_SHA256 = "babc3b9b85fdba6ece63fad3ea37a540c097460a43c4fac1f5619e6d721da075"

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCAB_SIZE = 4096

# A newline and the indentation after it are separate tokens. So a text that is cut at the start of
# a line is tokenised like the same lines inside a longer text. A word includes one leading
# punctuation mark or space ("(self", ".append", " return").
SPLIT_PATTERN = (
    r"\n"
    r"|(?<![^\n])[ \t]+"
    r"|[^\r\n\p{L}\p{N}_]?[\p{L}_]+"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}_]+"
    r"|\s"
)

# CPython's build or installation writes these files, so they differ between machines.
_NOT_PART_OF_THE_RELEASE = re.compile(
    r"(^|/)(site-packages|__pycache__)/|^config-|^_sysconfigdata|^build-details"
)
# Not program text: deliberately broken sources and one file of help pages.
_NOT_CODE = re.compile(r"(^|/)tokenizedata/|(^|/)encoded_modules/|^pydoc_data/topics\.py$")
_GENERATED_TABLE = "gencodec.py"

_HELD_OUT_SHARE = 0.04
_HELD_OUT_MAX_SHARED_LINES = 0.3
_HELD_OUT_MIN_BYTES = 4000


class CorpusError(RuntimeError):
    """The given directory does not contain the pinned standard library."""


@dataclass(frozen=True)
class Corpus:
    """Documents by relative name, split into training and held-out files."""

    train: dict[str, str]
    held_out: dict[str, str]


def load_corpus(stdlib: Path) -> Corpus:
    """Reads, verifies, filters, deduplicates and splits the standard library at `stdlib`."""
    sources = _read_sources(stdlib)
    verify_manifest(sources, stdlib)
    documents = _distinct(_code_only(sources))
    held_out = _held_out_names(documents)
    return Corpus(
        train={name: text for name, text in documents.items() if name not in held_out},
        held_out={name: text for name, text in documents.items() if name in held_out},
    )


def manifest(sources: dict[str, bytes]) -> tuple[int, str]:
    """The number of files and the SHA-256 over sorted relative names and contents."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        content = sources[name]
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return len(sources), digest.hexdigest()


def verify_manifest(sources: dict[str, bytes], stdlib: Path) -> None:
    """Raises CorpusError unless `sources` are those of the pinned release."""
    files, digest = manifest(sources)
    if files != CORPUS_FILES:
        raise CorpusError(
            f"{stdlib} has {files} Python sources; CPython {CPYTHON_VERSION} has {CORPUS_FILES}. "
            "Set --stdlib to the Lib directory of exactly that release, including its test package."
        )
    if digest != CORPUS_SHA256:
        raise CorpusError(
            f"{stdlib} has the same number of files as CPython {CPYTHON_VERSION}, but their "
            f"contents differ: manifest {digest}, expected {CORPUS_SHA256}."
        )


def _read_sources(stdlib: Path) -> dict[str, bytes]:
    paths = sorted(path for path in stdlib.rglob("*.py") if path.is_file())
    names = ((path, path.relative_to(stdlib).as_posix()) for path in paths)
    return {
        name: path.read_bytes() for path, name in names if not _NOT_PART_OF_THE_RELEASE.search(name)
    }


def _code_only(sources: dict[str, bytes]) -> dict[str, str]:
    """The sources that are UTF-8 program text, without the generated character tables."""
    documents = {}
    for name, content in sources.items():
        if _NOT_CODE.search(name):
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and _GENERATED_TABLE not in text:
            documents[name] = text.replace("\r\n", "\n")
    return documents


def _distinct(documents: dict[str, str]) -> dict[str, str]:
    """Keeps the first of the documents that share all their substantial lines."""
    first: dict[frozenset[str], str] = {}
    for name in sorted(documents):
        lines = _substantial_lines(documents[name])
        first.setdefault(lines or frozenset({name}), name)
    return {name: documents[name] for name in sorted(first.values())}


def _held_out_names(documents: dict[str, str]) -> set[str]:
    """A share of the files, chosen by a hash of the name, without those that resemble others."""
    users = Counter(line for text in documents.values() for line in _substantial_lines(text))
    chosen = set()
    for name, text in documents.items():
        lines = _substantial_lines(text)
        if _hash_fraction(name) >= _HELD_OUT_SHARE or len(text) < _HELD_OUT_MIN_BYTES:
            continue
        shared = sum(users[line] > 1 for line in lines)
        if shared <= _HELD_OUT_MAX_SHARED_LINES * len(lines):
            chosen.add(name)
    return chosen


def _substantial_lines(text: str) -> frozenset[str]:
    return frozenset(line.strip() for line in text.splitlines() if len(line.strip()) > 20)


def _hash_fraction(key: str) -> float:
    """A number in [0, 1) that depends on `key` alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains a lossless byte-level BPE of VOCAB_SIZE entries; entry 0 is END_OF_TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, documents: dict[str, str]) -> list[int]:
    """Concatenates all documents, with END_OF_TEXT before each and after the last."""
    order = sorted(documents, key=_hash_fraction)
    stream = [END_OF_TEXT_ID]
    for encoding in tokenizer.encode_batch([documents[name] for name in order]):
        stream.extend(encoding.ids)
        stream.append(END_OF_TEXT_ID)
    return stream


@dataclass(frozen=True)
class Prompt:
    """Part of a held-out file, from the start of a definition to the start of a later line."""

    file: str
    text: str


_DEFINITION = re.compile(r"^(?: {4})?(?:async def|def|class|@)\b", re.MULTILINE)


def cut_prompts(
    held_out: dict[str, str],
    tokenizer: Tokenizer,
    count: int,
    tokens: tuple[int, int] = (100, 300),
    follow: int = 64,
) -> list[Prompt]:
    """Cuts `count` prompts from different parts of the held-out files.

    The files take turns in the order of a hash, and so do the definitions inside a file. A prompt
    starts at a definition, where Python's tokenizer can start to read. It ends at the start of a
    line, at a length that the hash chooses.

    Args:
        held_out: Documents by relative name.
        tokenizer: Measures the lengths.
        count: Number of prompts.
        tokens: Shortest and longest prompt, in tokens.
        follow: Least number of tokens of the file after the prompt.

    Raises:
        CorpusError: The held-out files yield too few prompts.
    """
    queues = [
        _prompts_of_file(name, held_out[name], tokenizer, tokens, follow)
        for name in sorted(held_out, key=lambda name: _hash_fraction(f"prompt {name}"))
    ]
    prompts: list[Prompt] = []
    while queues and len(prompts) < count:
        remaining = []
        for queue in queues:
            prompt = next(queue, None)
            if prompt is not None:
                prompts.append(prompt)
                remaining.append(queue)
        queues = remaining
    if len(prompts) < count:
        raise CorpusError(f"the held-out files yield {len(prompts)} prompts, {count} are needed")
    return prompts[:count]


def _prompts_of_file(
    name: str, text: str, tokenizer: Tokenizer, tokens: tuple[int, int], follow: int
) -> Iterator[Prompt]:
    starts = [match.start() for match in _DEFINITION.finditer(text)]
    starts.sort(key=lambda start: _hash_fraction(f"{name}:{start}"))
    taken: list[tuple[int, int]] = []
    for start in starts:
        low, high = tokens
        wanted = low + _hash_fraction(f"length {name}:{start}") * (high - low)
        end = _line_start_after(text, start, int(wanted), tokenizer)
        length = len(tokenizer.encode(text[start:end]).ids)
        rest = len(tokenizer.encode(text[end : end + 20 * follow]).ids)
        overlaps = any(start < other_end and other < end for other, other_end in taken)
        if low <= length <= high and rest >= follow and not overlaps:
            taken.append((start, end))
            yield Prompt(name, text[start:end])


def _line_start_after(text: str, start: int, tokens: int, tokenizer: Tokenizer) -> int:
    """The start of the first line that is at least `tokens` tokens after `start`."""
    end, used = start, 0
    while used < tokens and end < len(text):
        newline = text.find("\n", end)
        line_end = len(text) if newline < 0 else newline + 1
        used += len(tokenizer.encode(text[end:line_end]).ids)
        end = line_end
    return end
