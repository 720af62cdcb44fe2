# SPDX-License-Identifier: Apache-2.0
"""Receipts: outputs of an engine with a drafter are replayed without one, and an edit is found.

    python examples/receipts.py

The receipts would be stored or handed on with the outputs; `paceline verify FILE` does the same as
the second half of this script.
"""

import copy

from paceline import LLM, SamplingParams
from paceline.demo import find_demo
from paceline.receipts import verify

PROMPTS = ["class Stack:", "def read_lines(path):"]


def main() -> None:
    demo = find_demo("draft_model")
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=48, receipt="with_text")
    with LLM(demo.target, speculative_config=demo.speculative_config()) as llm:
        outputs = llm.generate(PROMPTS, params)
    receipts = [(repr(one.prompt), one.outputs[0].receipt) for one in outputs]

    edited = copy.deepcopy(outputs[0].outputs[0].receipt)
    assert edited is not None
    edited["tokens"][5] += 1
    with LLM(demo.target) as llm:
        for verdict in verify(llm, [*receipts, ("edited", edited)]):
            print(verdict)


if __name__ == "__main__":
    main()
