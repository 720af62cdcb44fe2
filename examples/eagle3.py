# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3: the same tokens as plain decoding, and how many drafts were accepted at each position.

python examples/eagle3.py [MODEL DRAFT_HEAD]
"""

import sys

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths

PROMPTS = ["def read_lines(path):", "class Stack:"]


def main() -> None:
    model, head = sys.argv[1:3] if len(sys.argv) > 2 else map(str, demo_paths("eagle3"))
    params = SamplingParams(temperature=0.7, seed=7, max_tokens=64)

    with LLM(model) as llm:
        plain = llm.generate(PROMPTS, params)
    speculative = {
        "method": "eagle3",
        "model": head,
        "num_speculative_tokens": 3,
        "x": {"adaptive": False},  # always 3, to see how many are accepted
    }
    with LLM(model, speculative_config=speculative) as llm:
        drafted = llm.generate(PROMPTS, params)

    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        speculation = other.metrics.speculative_decoding
        assert speculation is not None
        print(f"{other.prompt!r}: the tokens of plain decoding, ", end="")
        print(f"{speculation['mean_acceptance_length']:.2f} tokens per iteration")
        for position, rate in enumerate(speculation["acceptance_per_position"], 1):
            print(f"  draft {position}: " + ("never verified" if rate is None else f"{rate:.0%}"))


if __name__ == "__main__":
    main()
