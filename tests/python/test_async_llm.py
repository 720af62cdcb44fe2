# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: its outputs, errors and lifetime."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from pathlib import Path
from typing import Any

import pytest

from async_tasks import GREEDY, LONG, LONGEST, idle, last, run, until_queued
from paceline import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from paceline.request import Request
from test_llm_processes import assert_succeeds
from time_limits import HANG_LIMIT_S

HELLO = [{"role": "user", "content": "Hello"}]


# ---- outputs -------------------------------------------------------------------------------------


def test_200_tasks_give_the_outputs_of_generate(allm: AsyncLLM, llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(200)]
    params = [
        SamplingParams(temperature=i % 2, max_tokens=1 + i % 40, seed=i, n=1 + (i % 7 == 0))
        for i in range(200)
    ]
    expected = llm.generate(prompts, params)

    async def main() -> list[RequestOutput]:
        jobs = zip(prompts, params, strict=True)
        return await asyncio.gather(*(last(allm.generate(*job)) for job in jobs))

    outputs = run(main())
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert [output.prompt_token_ids for output in outputs] == [
        output.prompt_token_ids for output in expected
    ]
    assert all(output.metrics.speculative_decoding is not None for output in outputs)
    assert len({output.request_id for output in outputs}) == 200


def test_outputs_grow(allm: AsyncLLM, llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.9, max_tokens=60, seed=1, n=2, logprobs=1, prompt_logprobs=1, stop=["e"]
    )
    (expected,) = llm.generate("abc", params)

    async def main() -> list[RequestOutput]:
        outputs = allm.generate("abc", params, request_id="mine")
        assert outputs.request_id == "mine"
        return [output async for output in outputs]

    for _ in range(50):  # on a busy machine, the first output that the task gets may be the last
        *partial, final = run(main())
        if partial:
            break
    assert final.outputs == expected.outputs
    assert final.prompt_logprobs == expected.prompt_logprobs
    assert partial and all(not output.finished for output in partial)
    for output in partial:
        assert output.request_id == "mine" and output.prompt == "abc"
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert output.metrics.num_output_tokens == sum(len(o.token_ids) for o in output.outputs)
        for completion in output.outputs:
            count = len(completion.token_ids)
            assert completion.logprobs in (
                None,
                expected.outputs[completion.index].logprobs[:count],
            )


def test_stream_gives_the_chunks_of_stream(allm: AsyncLLM, llm: LLM) -> None:
    async def main() -> tuple[list[int], str, RequestOutput | None]:
        token_ids: list[int] = []
        text = ""
        output = None
        async for chunk in allm.stream("abc", GREEDY):
            token_ids += chunk.token_ids
            text += chunk.text
            output = chunk.output
        return token_ids, text, output

    token_ids, text, output = run(main())
    assert output is not None and output.outputs == llm.generate("abc", GREEDY)[0].outputs
    assert (token_ids, text) == (output.outputs[0].token_ids, output.outputs[0].text)


def test_chat_is_that_of_llm(allm: AsyncLLM, llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
    options: Any = {"chat_template": template, "chat_template_kwargs": {"mood": "glad"}}
    (expected,) = llm.chat(HELLO, GREEDY, **options)

    async def main() -> RequestOutput:
        with pytest.raises(ValueError, match="list of conversations; allowed: one"):
            await last(allm.chat([HELLO], GREEDY, **options))  # type: ignore[list-item]
        return await last(allm.chat(HELLO, GREEDY, **options))

    output = run(main())
    assert output.prompt == "Helloglad" and output.outputs == expected.outputs


def test_a_chat_is_streamed(allm: AsyncLLM, llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}"
    options: Any = {"chat_template": template, "chat_template_kwargs": {"mood": "glad"}}
    params = SamplingParams(seed=1, max_tokens=16, n=2)
    (expected,) = llm.chat(HELLO, params, **options)

    async def main() -> None:
        with pytest.raises(TypeError, match="stream_chat has no parameter 'documents'"):
            allm.stream_chat(HELLO, documents=[])  # type: ignore[arg-type]
        stream = allm.stream_chat(HELLO, params, **options)
        assert stream.prompt_token_ids == []
        await stream.start()
        await stream.start()  # changes nothing
        assert stream.prompt_token_ids == expected.prompt_token_ids
        chunks = [chunk async for chunk in stream]
        for one in expected.outputs:
            own = [chunk for chunk in chunks if chunk.sample == one.index]
            assert "".join(chunk.text for chunk in own) == one.text
            assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == one.finish_reason and own[-1].finished
            assert own[-1].stop_reason == one.stop_reason

    run(main())


def test_starting_raises_the_errors_of_a_request(allm: AsyncLLM, llm: LLM) -> None:
    async def main() -> None:
        stream = allm.stream([10**6], GREEDY)
        with pytest.raises(ValueError, match="is token id 1000000"):
            await stream.start()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        running = allm.stream("a", LONG)
        await running.start()
        await running.aclose()
        await idle(llm)

    run(main())


def test_seeds_are_those_of_generate(target_dir: Path) -> None:
    params = SamplingParams(max_tokens=6)
    options: Any = {"device": "cpu", "seed": 3, "max_model_len": 64, "show_progress": False}
    with LLM(target_dir, **options) as llm:
        expected = [output.outputs for output in llm.generate(["a"] * 8, params)]

    async def main() -> list[Any]:
        async with AsyncLLM(target_dir, **options) as allm:
            outputs = await asyncio.gather(*(last(allm.generate("a", params)) for _ in range(8)))
            return [output.outputs for output in outputs]

    assert run(main()) == expected


# ---- errors --------------------------------------------------------------------------------------


def test_errors_reach_the_task(allm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        for prompt, params, match in (
            ("", GREEDY, "prompt is empty"),
            (5, GREEDY, r"^prompt is 5 \(int\)"),
            (["a", "b"], GREEDY, r"a list of prompts; allowed: one prompt. Start a task for each"),
            (HELLO, GREEDY, r"chat\(messages\) takes messages"),
            ("a", {"n": 1}, "sampling_params is {'n': 1}"),
            ("a", [GREEDY], "sampling_params is"),
            ("a" * 100_000, GREEDY, "tokens; allowed: at most"),
        ):
            outputs = allm.generate(prompt, params)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=match):
                await anext(outputs)
            with pytest.raises(StopAsyncIteration):
                await anext(outputs)
        outputs = allm.generate("a", LONG)
        waiting = asyncio.create_task(last(outputs))
        while not outputs._is_waiting:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task waits"):
            await anext(outputs)
        waiting.cancel()
        # A failure of one request leaves the others alone.
        push = Request.push

        def fail(self: Request, event: Any) -> Any:
            if self.prompt == "a":
                raise OSError("no such token")
            return push(self, event)

        with monkeypatch.context() as patch:
            patch.setattr(Request, "push", fail)
            other = asyncio.create_task(last(allm.generate("b", GREEDY)))
            with pytest.raises(OSError, match="no such token"):
                await last(allm.generate("a", LONG))
            assert (await other).finished
        await idle(allm.llm)

    run(main())


def test_a_failed_request_raises(allm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "error", "it broke")

    async def main() -> RequestOutput | None:
        with pytest.raises(RequestError, match="it broke") as caught:
            await last(allm.generate("a", GREEDY))
        assert len(caught.value.outputs) == 1
        chunks = [chunk async for chunk in allm.stream("a", GREEDY)]
        return chunks[-1].output

    output = run(main())
    assert output is not None and output.error == "it broke"


def test_a_request_belongs_to_one_loop(allm: AsyncLLM) -> None:
    outputs = allm.generate("a", LONG)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(outputs))

    async def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await anext(outputs)

    run(elsewhere())
    loop.close()


# ---- lifetime ------------------------------------------------------------------------------------


def test_close_ends_the_tasks(target_dir: Path, llm: LLM) -> None:
    async def main() -> None:
        allm = AsyncLLM(target_dir, device="cpu", max_model_len=512, show_progress=False)
        tasks = [asyncio.create_task(last(allm.generate("a", LONGEST))) for _ in range(4)]
        await until_queued(allm.llm, 4)
        allm.close()
        allm.close()
        for task in tasks:
            with pytest.raises(RuntimeError, match="closed while a request was running"):
                await task
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            await anext(allm.generate("a"))
        assert "closed" in repr(allm) and repr(allm).startswith("<AsyncLLM")
        # One that shares its LLM leaves that open.
        shared = AsyncLLM.from_llm(llm)
        task = asyncio.create_task(last(shared.generate("a", LONGEST)))
        await until_queued(llm, 1)
        shared.close()
        with pytest.raises(RuntimeError, match="this AsyncLLM was closed while"):
            await task
        with pytest.raises(RuntimeError, match="this AsyncLLM is closed"):
            await anext(shared.generate("a"))
        await idle(llm)

    run(main())


def test_an_abandoned_one_is_freed(target_dir: Path) -> None:
    async def main() -> Any:
        allm = AsyncLLM(target_dir, device="cpu", max_model_len=64, show_progress=False)
        dispatcher = allm.llm._dispatcher
        outputs = allm.generate("a", SamplingParams(max_tokens=40, ignore_eos=True))
        del allm
        await last(outputs)  # the iterator keeps it alive
        return dispatcher

    dispatcher = run(main())
    gc.collect()
    end = time.monotonic() + HANG_LIMIT_S
    while not dispatcher.is_closed:  # the worker may not have let go of the request yet
        assert time.monotonic() < end
        time.sleep(0.001)


def test_exit_and_fork(target_dir: Path) -> None:
    code = """
    import asyncio
    from paceline import AsyncLLM

    allm = AsyncLLM.from_llm(build())
    loop = asyncio.new_event_loop()
    outputs = allm.generate("a", LONG)
    loop.run_until_complete(anext(outputs))
    pid = os.fork()
    if pid == 0:
        async def child():
            try:
                await anext(allm.generate("a"))
            except RuntimeError as error:
                assert "forked" in str(error)
                return 7
        os._exit(asyncio.new_event_loop().run_until_complete(child()))
    print(waited(pid))
    # The process ends while a request runs and its loop is open.
    """
    assert assert_succeeds(code, target_dir) == "7\n"


def test_the_constructor_is_that_of_llm(llm: LLM) -> None:
    assert inspect.signature(AsyncLLM.__init__) == inspect.signature(LLM.__init__)
    with pytest.raises(TypeError, match="AsyncLLM has no parameter 'modle'"):
        AsyncLLM("x", modle=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        AsyncLLM("x", max_num_seqs=0)
    with pytest.raises(ValueError, match="llm is 'x'"):
        AsyncLLM.from_llm("x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be pickled"):
        AsyncLLM.from_llm(llm).__reduce__()
