# SPDX-License-Identifier: Apache-2.0
"""Outputs under a grammar: valid, and with speculation the tokens of plain decoding.

300 random schemas run plainly, and each in some of the cells method x k = 1..7, among requests
without a grammar. Every second cell has a pool so small that sequences are preempted. The models
are the demos, and the demos with dummy weights, whose outputs are wild. Block drafters have random
weights, so only forced tokens make them right; their number of drafts varies in some cells.

PACELINE_TEST_LEVEL=3 runs every schema in every cell.
"""

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import block_models
import json_schemas
from block_models import BlockSpec
from paceline import LLM, SamplingParams
from paceline.demo import find_demo
from paceline.outputs import RequestOutput

LEVEL = int(os.environ.get("PACELINE_TEST_LEVEL", "1"))
SEED = int(os.environ.get("PACELINE_SEED", "17"))
NUM_SCHEMAS = 300
# Rows that predict the token at their position, or the one after it.
BLOCKS = {
    "dflash": BlockSpec("z-lab", block_size=8, window=9),
    "dflash2": BlockSpec(
        "z-lab", block_size=8, window=9, is_causal=False, all_slide=True, taps=2, selector_top=16
    ),
    "dspark": BlockSpec("speculators", block_size=7, window=9, markov_rank=8, is_causal=False),
}
METHODS = ("ngram", "draft_model", "eagle3", "custom")
DRIVERS = ("unrolled", "replay", "while", "eager")
SCHEMAS = [json_schemas.make_schema(SEED * 1000 + i) for i in range(NUM_SCHEMAS)]


def params_of(i: int) -> SamplingParams:
    rng = random.Random(i)
    structured: dict[str, Any] = {"json": SCHEMAS[i]}
    if i % 5:
        structured["disable_any_whitespace"] = True
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.3)),
        top_p=rng.choice((1.0, 0.9)),
        seed=i,
        max_tokens=160,
        structured_outputs=structured,
    )


def echo(tokens: list[int]) -> list[int]:
    """A drafter of the caller: what followed the last token earlier."""
    for i in range(len(tokens) - 2, -1, -1):
        if tokens[i] == tokens[-1]:
            return tokens[i + 1 : i + 2]
    return []


@functools.cache
def block_drafter(method: str) -> Path:
    out = Path(tempfile.mkdtemp(prefix="paceline-structured-")) / method
    return block_models.write(BLOCKS[method], find_demo("draft_model").target, out)


def start(method: str | None, k: int, load_format: str, **options: Any) -> LLM:
    has_demo = method not in (None, "custom", *BLOCKS)
    demo = find_demo(method if method is not None and has_demo else "draft_model")
    nested = {"draft_driver": DRIVERS[k % 4], "adaptive": method in BLOCKS and k % 3 == 0}
    config: dict[str, Any] | None = None
    if method == "custom":
        config = {"method": "custom", "drafter": echo, "num_speculative_tokens": k}
    elif method in BLOCKS:
        config = {"model": str(block_drafter(method)), "num_speculative_tokens": k, "x": nested}
    elif method is not None:
        config = demo.speculative_config(k) | {"x": nested}
    return LLM(
        str(demo.target),
        speculative_config=config,
        load_format=load_format,
        max_model_len=256,
        max_num_seqs=16,
        **options,
    )


def run(llm: LLM, indices: Sequence[int]) -> tuple[list[RequestOutput], int]:
    """Runs the schemas, each beside a request without a grammar; counts preemptions, too."""
    prompts = [prompt for i in indices for prompt in (f"x = {i}\n", f"def f{i}(")]
    free = [SamplingParams(seed=i, max_tokens=20) for i in indices]
    params = [param for i, one in zip(indices, free, strict=True) for param in (params_of(i), one)]
    with llm:
        return llm.generate(prompts, params), llm.stats()["num_preemptions"]


@pytest.fixture(scope="module", params=["auto", "dummy"])
def plain(request: pytest.FixtureRequest) -> tuple[str, list[RequestOutput]]:
    """The outputs without a drafter: of schema i, and of its neighbour."""
    return request.param, run(start(None, 0, request.param), range(NUM_SCHEMAS))[0]


def test_finished_outputs_are_valid(plain: tuple[str, list[RequestOutput]]) -> None:
    _, outputs = plain
    num_finished = 0
    for i, schema in enumerate(SCHEMAS):
        (output,) = outputs[2 * i].outputs
        if output.finish_reason == "length":
            continue
        assert output.finish_reason == "stop"
        value = json.loads(output.text)
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
        num_finished += 1
    assert num_finished > NUM_SCHEMAS // 2


@pytest.mark.parametrize("methods", [METHODS, tuple(BLOCKS)], ids=["others", "blocks"])
def test_speculation_changes_no_token(
    methods: tuple[str, ...], plain: tuple[str, list[RequestOutput]]
) -> None:
    load_format, expected = plain
    num_accepted = num_drafted = num_preempted = 0
    cells = [(method, k) for method in methods for k in range(1, 8)]
    if load_format == "dummy" and LEVEL < 3:
        cells = cells[::3]
    for cell, (method, k) in enumerate(cells):
        some = range(cell, NUM_SCHEMAS, len(cells))
        indices = some if LEVEL < 3 else range(NUM_SCHEMAS)
        llm = start(method, k, load_format, **({"kv_cache_bytes": 3 << 19} if cell % 2 else {}))
        outputs, num_here = run(llm, indices)
        num_preempted += num_here
        for position, i in enumerate(indices):
            for neighbour in range(2):
                actual = outputs[2 * position + neighbour]
                plain_one = expected[2 * i + neighbour]
                assert actual.outputs == plain_one.outputs, (method, k, i, neighbour)
                metrics = actual.metrics.speculative_decoding
                assert metrics is not None
                if neighbour == 0:
                    num_drafted += metrics["num_draft_tokens"]
                    num_accepted += metrics["num_accepted_draft_tokens"]
    # Forced tokens alone are many.
    share = 10 if methods == tuple(BLOCKS) else 3
    assert num_accepted > num_drafted / share > 100
    assert num_preempted > 20
