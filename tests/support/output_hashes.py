# SPDX-License-Identifier: Apache-2.0
"""Hashes what all tiny models and demos write, to show that a change leaves every bit as it was.

    python tests/support/output_hashes.py before.json             write the hashes
    python tests/support/output_hashes.py after.json before.json  and compare them with others

A hash covers logits of a prompt, and the tokens, logprobs and numbers of drafts of seeded requests.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equality_jobs import jobs, run
from equality_models import DRAFTERS, TARGETS, is_possible, model
from paceline import LLM, SamplingParams, _core
from paceline.demo import demo_names, find_demo

_K = 3
_PROMPTS = ("def read_lines(path):", "class Stack:", "import os\n")


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def options(drafter: str | None) -> dict[str, Any]:
    found = {
        "max_model_len": 128, "max_num_seqs": 8, "kv_cache_bytes": 32 << 20, "num_threads": 2,
        "max_logprobs": 3, "enable_prefix_caching": False,
    }  # fmt: skip
    if drafter is not None:
        found |= {"num_speculative_tokens": _K, "adaptive": False}
    if drafter == "ngram":
        found |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return found


def tiny_models() -> Iterator[tuple[str, str]]:
    for family in TARGETS:
        for dtype in ("float32", "bfloat16"):
            target = model(family, "target", dtype)
            with LLM.from_loaded(target, max_model_len=128, show_progress=False) as llm:
                logits = llm.logits({"prompt_token_ids": list(range(1, 100))})
            yield f"{family} {dtype} logits", digest(logits.tobytes())
            for drafter in (None, *(one for one in DRAFTERS if is_possible(family, one))):
                has_model = drafter not in (None, "ngram")
                draft = model(family, drafter, dtype).model if has_model and drafter else None
                executor = _core.Executor(target.model, draft, options(drafter))
                try:
                    outcomes = run(executor, jobs(8, True), 0.8)
                finally:
                    executor.close()
                yield f"{family} {dtype} {drafter or 'plain'}", digest(outcomes)


def demos() -> Iterator[tuple[str, str]]:
    for name in demo_names():
        demo = find_demo(name)
        for config in (None, demo.speculative_config()):
            with LLM(str(demo.target), speculative_config=config, show_progress=False) as llm:
                params = [
                    SamplingParams(temperature=t, seed=7, max_tokens=64, logprobs=2)
                    for t in (0.0, 0.8, 1.0)
                ]
                outputs = llm.generate(list(_PROMPTS), params)
                found = [
                    (one.text, one.token_ids, one.logprobs, one.finish_reason)
                    for output in outputs
                    for one in output.outputs
                ]
                drafts = (
                    [output.metrics.speculative_decoding for output in outputs] if config else []
                )
                logits = llm.logits(_PROMPTS[0])
            yield (
                f"demo {name} {'plain' if config is None else 'speculative'}",
                digest((found, drafts, logits.tobytes())),
            )


def main(written: str, expected: str | None = None) -> int:
    found = dict([*demos(), *tiny_models()])
    Path(written).write_text(json.dumps(found, indent=1) + "\n")
    if expected is None:
        print(f"{written}: {len(found)} hashes")
        return 0
    others = json.loads(Path(expected).read_text())
    different = sorted(name for name in {*found} & {*others} if found[name] != others[name])
    missing = sorted({*others} - {*found})
    print(
        f"{written}: of {len(others)} hashes in {expected}, {len(different)} differ",
        f"and {len(missing)} are missing; {len({*found} - {*others})} are new",
    )
    for name in different:
        print(f"differs: {name}")
    for name in missing:
        print(f"missing: {name}")
    return 1 if different or missing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
