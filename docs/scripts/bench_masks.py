#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what the masks of a verify window cost on the host; prints CPU times by row.

    python docs/scripts/bench_masks.py --vocab-size 131072 --corpus FOLDER

Trains a tokenizer of that size on the Python files of a folder, and walks random documents of the
schemas of tests/support/json_schemas.py with windows of k = 7 right drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "python")]

import json_schemas  # noqa: E402
from paceline.grammar import Grammars  # noqa: E402
from paceline.structured_outputs import StructuredOutputsParams  # noqa: E402

K = 7


def train(corpus: Path, vocab_size: int, num_bytes: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of the first files of a folder."""
    texts, left = [], num_bytes
    for path in sorted(corpus.rglob("*.py")):
        if left <= 0:
            break
        texts.append(path.read_text(errors="ignore"))
        left -= len(texts[-1])
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    """Prints the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=131072)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--num-bytes", type=int, default=40_000_000)
    parser.add_argument("--num-schemas", type=int, default=300)
    args = parser.parse_args()
    tokenizer = train(args.corpus, args.vocab_size, args.num_bytes)
    vocab_size = tokenizer.get_vocab_size()
    target = SimpleNamespace(
        tokenizer=SimpleNamespace(tokenizer=tokenizer),
        eos_token_ids=(0,),
        vocab_size=vocab_size,
        path="trained",
    )
    grammars = Grammars(target)  # type: ignore[arg-type]
    words = (vocab_size + 31) // 32
    masks = np.zeros((K + 1, words), np.uint32)
    address = masks.ctypes.data
    rng = np.random.default_rng(0)
    per_row, compile_ms, num_drafts, num_kept = [], [], 0, 0
    for seed in range(args.num_schemas):
        schema = json_schemas.make_schema(seed)
        begin = time.perf_counter()
        grammar = grammars.compile(
            StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)
        )
        compile_ms.append((time.perf_counter() - begin) * 1e3)
        # A random document: its drafts are what it goes on with.
        (walk,) = grammars.constraints(grammar.text, 1)
        document: list[int] = []
        emitted: list[int] = []
        while len(document) < 120:
            masks[:] = 0
            walk.constrain(emitted, [], 0, address)
            allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            if token == 0:
                break
            emitted = [token]
            document.append(token)
        (constraint,) = grammars.constraints(grammar.text, 1)
        emitted, at = [], 0
        while at < len(document):
            masks[:] = 0
            drafts = document[at : at + K]
            begin = time.process_time()  # of all threads, so that a busy machine does not matter
            kept = constraint.constrain(emitted, drafts, K, address)
            per_row.append((time.process_time() - begin) * 1e6 / (len(kept) + 1))
            num_drafts += len(drafts)
            num_kept += len(kept)
            step = int(rng.integers(1, K + 2))
            emitted = document[at : at + step]
            at += step
    per_row.sort()
    print(f"vocabulary {vocab_size}, {len(per_row)} windows, {num_kept} of {num_drafts} drafts")
    print(f"first compilation {compile_ms[0]:.0f} ms, with the tokenizer")
    print(f"compiling a schema: median {statistics.median(compile_ms):.2f} ms, "
          f"most of the others {max(compile_ms[1:]):.1f} ms")  # fmt: skip
    for share in (0.5, 0.9, 0.99, 1.0):
        index = min(int(share * len(per_row)), len(per_row) - 1)
        print(f"p{share * 100:g}: {per_row[index]:.0f} us a row")


if __name__ == "__main__":
    main()
