# SPDX-License-Identifier: Apache-2.0
"""Streaming: each chunk is printed when the iteration that made it ends.

python examples/stream.py [PROMPT]
"""

import sys

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def quicksort(items):"
    target, draft = demo_paths("draft_model")
    speculative = {"model": str(draft), "num_speculative_tokens": 4}
    with LLM(target, speculative_config=speculative) as llm:
        print(prompt, end="", flush=True)
        # Leaving the `with` block cancels what still runs, so breaking out of the loop is safe.
        with llm.stream(prompt, SamplingParams(temperature=0, max_tokens=96)) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                if chunk.output is not None:
                    metrics = chunk.output.metrics
                    print(f"\n--- first token after {metrics.time_to_first_token_ms:.1f} ms")
                    print(
                        f"--- {metrics.num_output_tokens} tokens in {metrics.total_time_ms:.0f} ms"
                    )


if __name__ == "__main__":
    main()
