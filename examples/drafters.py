# SPDX-License-Identifier: Apache-2.0
"""Another drafter for an engine that runs: the output does not change, the speed does.

python examples/drafters.py
"""

import dataclasses
import threading

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths

PROMPTS = ["def read_lines(path):", "class Stack:", "import os\n", "for i in range("]


def main() -> None:
    target, draft = demo_paths("draft_model")
    drafters = {
        "prompt lookup": {"method": "ngram", "num_speculative_tokens": 4},
        "a draft model": {"model": str(draft), "num_speculative_tokens": 4},
        "prompt lookup in front of it": {
            "model": str(draft),
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
        "none": None,
    }
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    texts: list[list[str]] = []

    with LLM(target, show_progress=False) as llm:

        def generate() -> None:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])

        generate()  # plain decoding
        requests = threading.Thread(target=generate)
        requests.start()
        for name, config in drafters.items():
            llm.set_drafter(config, show_progress=False)
            print(f"the drafter is {name}; {llm.stats()['num_running']} requests run")
        requests.join()
        # With two of them, a request may choose.
        llm.set_drafter(drafters["prompt lookup in front of it"], show_progress=False)
        for method in (None, "ngram", "draft_model"):
            chosen = dataclasses.replace(params, speculative_method=method)
            (output,) = llm.generate(PROMPTS[0], chosen, use_tqdm=False)
            assert output.outputs[0].text == texts[0][0]
            figures = output.metrics.speculative_decoding
            assert figures is not None
            for name, of in figures["drafters"].items():
                accepted, drafted = of["num_accepted_draft_tokens"], of["num_draft_tokens"]
                print(f"{method or 'both'}: {name} had {accepted} of {drafted} drafts accepted")
    print("the outputs are the same:", texts[0] == texts[1])


if __name__ == "__main__":
    main()
