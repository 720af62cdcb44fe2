# SPDX-License-Identifier: Apache-2.0
"""Chat: messages become a prompt through the checkpoint's own chat template.

    python examples/chat.py [MODEL [DRAFTER]]

The demo checkpoints know Python code and no dialogue, so the messages are code; their template
writes one message after the other. MODEL and DRAFTER are folders or names of the hub.
"""

import sys

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths


def main() -> None:
    model, drafter = map(str, demo_paths("draft_model"))
    if len(sys.argv) > 1:
        model, drafter = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    speculative = {"model": drafter, "num_speculative_tokens": 4} if drafter else None
    params = SamplingParams(temperature=0, max_tokens=48)

    conversation: list[dict[str, str]] = []
    with LLM(model, speculative_config=speculative) as llm:
        for question in ("def read_lines(path):", "def write_lines(path, lines):"):
            conversation.append({"role": "user", "content": question})
            (output,) = llm.chat(conversation, params)
            answer = output.outputs[0].text
            print(f"user> {question}\nassistant> {answer}\n")
            conversation.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
