# SPDX-License-Identifier: Apache-2.0
"""Many prompts at once: greedy and sampled, several outputs, stop strings and log-probabilities.

    python examples/batch.py [MODEL [DRAFTER]]

Without arguments it uses the demo checkpoints. MODEL and DRAFTER are folders or ids of the hub.
"""

import sys

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths

PROMPTS = ["def read_lines(path):", "class Stack:", "import os\n\n\ndef walk(top):"]


def main() -> None:
    model, drafter = map(str, demo_paths("draft_model"))
    if len(sys.argv) > 1:
        model, drafter = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    speculative = {"model": drafter, "num_speculative_tokens": 4} if drafter else None

    with LLM(model, speculative_config=speculative) as llm:
        # One list of parameters for all prompts, or one for each of them.
        params = [
            SamplingParams(temperature=0, max_tokens=32),
            SamplingParams(temperature=0.8, top_p=0.95, seed=1, n=2, max_tokens=32),
            SamplingParams(temperature=0, max_tokens=64, stop=["\n\n"], logprobs=1),
        ]
        for output in llm.generate(PROMPTS, params):
            print(f"=== {output.prompt!r}")
            for completion in output.outputs:
                print(completion.text)
                print(f"--- {len(completion.token_ids)} tokens, {completion.finish_reason}")
                if completion.cumulative_logprob is not None:
                    print(f"--- log-probability {completion.cumulative_logprob:.3f}")
            speculation = output.metrics.speculative_decoding
            if speculation is not None:
                # None if no draft was verified: the engine drafts only where that is faster.
                length = speculation["mean_acceptance_length"]
                if length is not None:
                    print(f"--- {length:.2f} tokens per iteration with drafts")


if __name__ == "__main__":
    main()
