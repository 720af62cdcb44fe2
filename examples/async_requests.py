# SPDX-License-Identifier: Apache-2.0
"""Many asyncio tasks share one engine; cancelling a task frees its memory at once.

python examples/async_requests.py
"""

import asyncio

from paceline import AsyncLLM, SamplingParams
from paceline.demo import demo_paths

PROMPTS = ["def read_lines(path):", "class Stack:", "import os\n", "for i in range("]


async def answer(engine: AsyncLLM, prompt: str) -> str:
    """Returns the whole completion; each `output` has the text so far."""
    text = ""
    params = SamplingParams(temperature=0, max_tokens=48)
    async for output in engine.generate(prompt, params):
        text = output.outputs[0].text
    return text


async def main() -> None:
    target, draft = demo_paths("draft_model")
    speculative = {"model": str(draft), "num_speculative_tokens": 4}
    async with AsyncLLM(target, speculative_config=speculative) as engine:
        texts = await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS))
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(f"=== {prompt!r}\n{text}")

        # A client that goes away: the request ends within one iteration.
        endless = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
        task = asyncio.create_task(_consume(engine, endless))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while engine.llm.stats()["num_running"]:
            await asyncio.sleep(0.001)
        print("--- cancelled; no request runs")


async def _consume(engine: AsyncLLM, params: SamplingParams) -> None:
    async for _ in engine.generate("def forever():", params):
        pass


if __name__ == "__main__":
    asyncio.run(main())
