# SPDX-License-Identifier: Apache-2.0
"""A capture: outputs and what became of their drafts, in shards of safetensors.

It needs the package safetensors, which reads the shards.

python examples/capture.py [PROMPT...]
"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

from paceline import LLM, SamplingParams, Tokenizer
from paceline.demo import demo_paths


def main() -> None:
    prompts = sys.argv[1:] or ["def quicksort(items):", "class Stack:"]
    target, draft = demo_paths("draft_model")
    speculative = {"model": str(draft), "num_speculative_tokens": 4}
    with tempfile.TemporaryDirectory() as folder:
        with LLM(target, speculative_config=speculative) as llm:
            # Ends with the LLM, which writes what is left.
            llm.start_capture(folder, max_bytes=10_000_000)
            llm.generate(prompts, SamplingParams(n=2, seed=1, max_tokens=48))
            tokenizer = llm.get_tokenizer()
        for path in sorted(Path(folder).glob("capture-*.safetensors")):
            show(path, tokenizer)


def show(path: Path, tokenizer: Tokenizer) -> None:
    """Prints the outputs of a shard."""
    with safe_open(path, framework="np") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    prompts = parts(tensors, "prompt_ids", "prompt_offsets")
    outputs = parts(tensors, "output_ids", "output_offsets")
    drafted = parts(tensors, "step_drafted", "step_offsets")
    accepted = parts(tensors, "step_accepted", "step_offsets")
    for i, output in enumerate(outputs):
        prompt = prompts[tensors["output_requests"][i]]
        steps = max(1, sum(drafts > 0 for drafts in drafted[i]))
        print(f"--- {len(prompt)} tokens of prompt, {len(output)} of output", end=", ")
        print(f"served with an acceptance length of {1 + sum(accepted[i]) / steps:.2f}")
        print(tokenizer.decode(prompt + output))


def parts(tensors: dict[str, Any], values: str, offsets: str) -> list[list[int]]:
    """The parts of a joined tensor."""
    bounds = itertools.pairwise(tensors[offsets])
    return [tensors[values][begin:end].tolist() for begin, end in bounds]


if __name__ == "__main__":
    main()
