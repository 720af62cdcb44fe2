# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup on a code edit: the answer repeats most of the prompt, so n-grams draft well.

    python examples/ngram_edit.py

No draft model is needed: drafts are the tokens that followed the same n-gram earlier in the prompt
or the output.
"""

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths

# Two methods of the same shape; the model continues with a third.
CODE = """\
    def test_read_returns_bytes(self):
        with open(self.filename, "rb") as stream:
            data = stream.read()
        self.assertIsInstance(data, bytes)

    def test_readline_returns_bytes(self):
        with open(self.filename, "rb") as stream:
            data = stream.readline()
        self.assertIsInstance(data, bytes)

    def test_readlines_returns_bytes(self):
        with open(self.filename, "rb") as stream:
"""


def main() -> None:
    target, _ = demo_paths("draft_model")
    ngram = {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 8,
        "x": {"adaptive": False},  # always 8, to see how many are accepted
    }
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(target, speculative_config=ngram) as llm:
        (output,) = llm.generate(CODE, params)
    print(CODE + output.outputs[0].text)
    speculation = output.metrics.speculative_decoding
    assert speculation is not None
    print(f"--- {speculation['mean_acceptance_length']:.2f} tokens per iteration")


if __name__ == "__main__":
    main()
