# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: outputs, cancelling, the event loop's latency, several loops, closing."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from paceline import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from paceline.demo import find_demo
from paceline.loader import TokenizerInfo
from paceline.request import Request
from test_llm_processes import assert_succeeds

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = SamplingParams(temperature=1.0, max_tokens=1500, seed=0)
HELLO = [{"role": "user", "content": "Hello"}]

_TIMEOUT_S = 60


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, _TIMEOUT_S))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The last output; checks that each one continues the one before."""
    before: RequestOutput | None = None
    async for output in outputs:
        if before is not None:
            assert not before.finished and before.request_id == output.request_id
            for old, new in zip(before.outputs, output.outputs, strict=True):
                assert new.text.startswith(old.text)
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
                assert (new.logprobs or [])[: len(old.token_ids)] == (old.logprobs or [])
        before = output
    assert before is not None and before.finished
    return before


async def idle(llm: LLM) -> dict[str, Any]:
    """Waits until the engine runs nothing and checks its memory; returns its counts."""
    executor = llm._executor
    while (stats := executor.stats())["num_running"] or stats["num_waiting"]:
        await asyncio.sleep(0.001)
    assert executor.check_integrity() == ""
    assert all(group["held_blocks"] == 0 for group in llm.memory_report()["groups"])
    assert not llm._dispatcher.sessions and not llm._dispatcher.open_samples
    return stats


@pytest.fixture
def allm(llm: LLM) -> Iterator[AsyncLLM]:
    """An AsyncLLM with a drafter, on an LLM that other tests use too."""
    made = AsyncLLM.from_llm(llm)
    yield made
    assert not made._session._by_name and not made._session._by_engine_id
    made.close()


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

    *partial, final = run(main())
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


# ---- cancelling ----------------------------------------------------------------------------------


async def _cancel_task(allm: AsyncLLM) -> None:
    task = asyncio.create_task(last(allm.generate("a", LONG)))
    await _until_running(allm.llm, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _break(allm: AsyncLLM) -> None:
    async for _ in allm.generate("a", LONG):
        break


async def _close_iterator(allm: AsyncLLM) -> None:
    outputs = allm.stream("a", LONG)
    await anext(outputs)
    await outputs.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)
    await outputs.aclose()


async def _close_from_another_task(allm: AsyncLLM) -> None:
    outputs = allm.generate("a", SamplingParams(max_tokens=1))
    await anext(outputs)
    outputs = allm.generate("a", LONG, "other")
    task = asyncio.create_task(anext(outputs))
    while outputs._feed is None or outputs._feed._waiter is None:
        if task.done():
            break
        await asyncio.sleep(0)
    await outputs.aclose()
    await asyncio.wait([task])


async def _fail_in_the_loop(allm: AsyncLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in allm.stream("a", LONG):
            _ = 1 / 0


async def _cancel_while_preparing(allm: AsyncLLM) -> None:
    """Of those tasks, the workers prepare the requests of the first two."""
    encode = TokenizerInfo.encode
    has_started = threading.Event()
    may_go_on = threading.Event()

    def slow_encode(self: TokenizerInfo, text: str, **options: Any) -> list[int]:
        has_started.set()
        may_go_on.wait(_TIMEOUT_S)
        return encode(self, text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenizerInfo, "encode", slow_encode)
        tasks = [asyncio.create_task(last(allm.generate("a", LONG))) for _ in range(9)]
        while not has_started.is_set():
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        may_go_on.set()
        # When both workers can meet, they have left those requests behind.
        meeting = threading.Barrier(2)
        loop = asyncio.get_running_loop()
        workers = allm._session.workers
        await asyncio.gather(*(loop.run_in_executor(workers, meeting.wait) for _ in range(2)))


async def _time_out(allm: AsyncLLM) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(last(allm.generate("a", LONG)), 0.02)


async def _until_running(llm: LLM, count: int) -> None:
    while llm._executor.stats()["num_running"] < count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "end",
    [
        _cancel_task,
        _break,
        _close_iterator,
        _close_from_another_task,
        _fail_in_the_loop,
        _cancel_while_preparing,
        _time_out,
    ],
)
def test_ending_early_frees_the_blocks(
    allm: AsyncLLM, llm: LLM, end: Callable[[AsyncLLM], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> tuple[int, int]:
        await end(allm)
        before = llm._executor.stats()["num_iterations"]
        stats = await idle(llm)
        return before, stats["num_iterations"]

    before, after = run(main())
    # The iteration that ran, and one whose inputs were staged at the same time.
    assert after <= before + 2


def test_closing_the_loop_cancels(allm: AsyncLLM, llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    outputs = allm.generate("a", dataclasses.replace(LONG, n=8))
    before = llm._executor.stats()["num_cancelled"]
    loop.run_until_complete(anext(outputs))
    loop.close()  # the next event finds it closed
    assert run(idle(llm))["num_cancelled"] == before + 8
    del outputs


def test_abort_ends_with_the_output_so_far(allm: AsyncLLM, llm: LLM) -> None:
    async def main() -> tuple[RequestOutput, RequestOutput, list[RequestOutput]]:
        running = allm.generate("a", LONG, "mine")
        seen = await anext(running)
        await allm.abort("mine")
        await allm.abort("mine")
        await allm.abort("nobody")
        outputs = [output async for output in running]
        # One that has not been queued yet.
        early = asyncio.create_task(last(allm.generate("a", LONG, "early")))
        while "early" not in allm._session._by_name:
            await asyncio.sleep(0)
        await allm.abort("early")
        result = seen, await early, outputs
        await idle(llm)
        return result

    seen, early, outputs = run(main())
    (completion,) = outputs[-1].outputs
    assert outputs[-1].finished and outputs[-1].error is None
    assert completion.finish_reason == "abort" and 0 < len(completion.token_ids) < 1500
    assert completion.token_ids[: len(seen.outputs[0].token_ids)] == seen.outputs[0].token_ids
    assert early.outputs[0].finish_reason == "abort" and early.metrics.total_time_ms >= 0


def test_a_request_id_is_taken_while_its_request_runs(allm: AsyncLLM) -> None:
    async def main() -> None:
        first = allm.generate("a", LONG, "x")
        await anext(first)
        with pytest.raises(ValueError, match="request_id is 'x', which a running request has"):
            await anext(allm.generate("b", GREEDY, "x"))
        await allm.abort("x")
        await last(first)
        assert (await last(allm.generate("b", GREEDY, "x"))).request_id == "x"
        # Names that callers choose may look like those that the engine gives.
        number = int((await last(allm.generate("b", GREEDY))).request_id)
        named = allm.generate("a", LONG, str(number + 2))
        await anext(named)
        unnamed = allm.generate("a", LONG)  # its number is number + 2
        output = await anext(unnamed)
        assert output.request_id == unnamed.request_id == f"{number + 2}'"
        await asyncio.gather(named.aclose(), unnamed.aclose())

    run(main())
    for name in ("", 3):
        with pytest.raises(ValueError, match="request_id is"):
            allm.generate("a", GREEDY, name)  # type: ignore[arg-type]


# ---- errors --------------------------------------------------------------------------------------


def test_errors_reach_the_task(allm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        for prompt, params, match in (
            ("", GREEDY, "prompt is empty"),
            (5, GREEDY, r"prompts is 5 \(int\)"),
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
        other = asyncio.create_task(last(allm.generate("b", GREEDY)))

        def fail(*_: Any) -> Any:
            raise OSError("no such token")

        with monkeypatch.context() as patch:
            patch.setattr(Request, "push", fail)
            with pytest.raises(OSError, match="no such token"):
                await last(allm.generate("a", LONG))
            await asyncio.wait([other])
        assert isinstance(other.exception(), OSError | None)
        await last(allm.generate("b", GREEDY))
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


# ---- the event loop ------------------------------------------------------------------------------


async def _worst_delay(stop: asyncio.Event) -> float:
    worst = 0.0
    while not stop.is_set():
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - start)
    return worst


def test_preparing_does_not_block_the_loop(allm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering and tokenizing take a second each here; the loop must be back in a half."""
    encode = TokenizerInfo.encode

    def slow_encode(self: TokenizerInfo, text: str, **options: Any) -> list[int]:
        time.sleep(1)
        return encode(self, text, **options)

    def slow_now(form: str) -> str:
        time.sleep(1)
        return form

    monkeypatch.setattr(TokenizerInfo, "encode", slow_encode)
    monkeypatch.setattr("paceline.chat_sandbox.check_strftime", slow_now)

    async def main() -> float:
        stop = asyncio.Event()
        watch = asyncio.create_task(_worst_delay(stop))
        await asyncio.sleep(0)
        start = time.perf_counter()
        await last(allm.chat(HELLO, GREEDY, chat_template="{{ strftime_now('now') }}"))
        assert time.perf_counter() - start > 2
        stop.set()
        return await watch

    assert run(main()) < 0.5


def test_a_long_prompt_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """While 50,000 characters are tokenized, the loop is never away for half of that time.

    Other processes may take the cores at any moment, so the best of several attempts counts.
    """
    text = "def f(x):\n    return x + 1  # one more\n" * 1300
    # Otherwise the length alone would rule the prompt out.
    monkeypatch.setattr("paceline.prompts.min_num_tokens", lambda *_: 0)

    async def attempt(allm: AsyncLLM) -> float:
        tokenizer = allm.llm.target.tokenizer
        assert tokenizer is not None
        start = time.perf_counter()
        tokenizer.encode(text[:50_000])
        duration = time.perf_counter() - start
        stop = asyncio.Event()
        watch = asyncio.create_task(_worst_delay(stop))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="allowed: at most"):
            await anext(allm.generate(text[:50_000], GREEDY))
        stop.set()
        return await watch / duration

    async def main() -> float:
        target = find_demo("draft_model").target
        async with AsyncLLM(target, device="cpu", max_num_seqs=1, show_progress=False) as allm:
            shares = []
            while len(shares) < 10 and min(shares, default=1) >= 0.5:
                shares.append(await attempt(allm))
            return min(shares)

    assert run(main()) < 0.5


def test_long_strings_have_the_same_tokens() -> None:
    """They take another way through the tokenizers package, which may fail without threads."""
    info = TokenizerInfo(find_demo("draft_model").target / "tokenizer.json")
    text = "def grüße(x):  # 日本語 🙂<|endoftext|>\n\treturn x ** 2\n" * 100
    original = info.tokenizer

    class WithoutThreads:
        encode = original.encode

        def encode_batch_fast(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no threads")

    for adds in (True, False):
        expected = original.encode(text, add_special_tokens=adds).ids
        info.tokenizer = original
        assert info.encode(text, add_special_tokens=adds) == expected
        info.tokenizer = WithoutThreads()  # type: ignore[assignment]
        assert info.encode(text, add_special_tokens=adds) == expected


def test_a_lock_that_is_kept_does_not_block_the_loop(allm: AsyncLLM, llm: LLM) -> None:
    """As while a thread adds requests and has to wait for an update of the weights."""

    async def main() -> tuple[float, int, bool]:
        running = allm.generate("a", LONG, "running")
        await anext(running)
        before = llm._executor.stats()["num_cancelled"]
        is_kept, may_end = threading.Event(), threading.Event()

        def keep() -> None:
            with llm._dispatcher.lock:
                is_kept.set()
                may_end.wait(_TIMEOUT_S)

        keeper = threading.Thread(target=keep)
        keeper.start()
        is_kept.wait()
        start = time.perf_counter()
        queued = asyncio.create_task(last(allm.generate("b", GREEDY)))
        await asyncio.sleep(0.01)
        await allm.abort("nobody")
        await running.aclose()
        duration = time.perf_counter() - start
        was_waiting = not queued.done()
        may_end.set()
        keeper.join()
        await queued
        await idle(llm)
        return duration, llm._executor.stats()["num_cancelled"] - before, was_waiting

    duration, num_cancelled, was_waiting = run(main())
    assert duration < 5 and num_cancelled == 1 and was_waiting


def test_an_iteration_wakes_the_loop_once(
    allm: AsyncLLM, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_requests = 32

    async def main() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        num_wakes = 0
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_wakes
            num_wakes += 1
            return wake(*args, **kwargs)

        before = llm._executor.stats()["num_iterations"]
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        await asyncio.gather(
            *(last(allm.generate(f"prompt {i}", GREEDY)) for i in range(num_requests))
        )
        return num_wakes, llm._executor.stats()["num_iterations"] - before

    num_wakes, num_iterations = run(main())
    # A worker wakes the loop once for each request that it has queued.
    assert num_wakes <= num_iterations + num_requests
    assert num_iterations < num_requests * 24  # there is something to save


def test_a_slow_task_delays_no_other_and_gets_fewer_outputs(allm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)

    async def main() -> tuple[int, bool, RequestOutput]:
        slow = allm.generate("slow", dataclasses.replace(params, max_tokens=1000))
        first = await anext(slow)
        await asyncio.gather(*(last(allm.generate(f"fast {i}", params)) for i in range(8)))
        is_first = not first.finished
        while len(allm._session._by_name) > 0:  # the slow one ends without its task
            await asyncio.sleep(0.001)
        rest = [output async for output in slow]
        return len(rest), is_first, rest[-1]

    num_outputs, is_first, final = run(main())
    assert is_first and num_outputs == 1 and len(final.outputs[0].token_ids) == 1000


def test_a_task_that_never_waits_lets_others_run(allm: AsyncLLM) -> None:
    async def main() -> int:
        chunks = allm.stream("a", SamplingParams(max_tokens=200, ignore_eos=True, seed=0))
        await anext(chunks)
        while allm._session._by_name:
            await asyncio.sleep(0.001)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        num_chunks = len([chunk async for chunk in chunks])
        counter.cancel()
        assert num_chunks > 32
        return turns

    assert run(main()) >= 2


def test_loops_of_several_threads(allm: AsyncLLM, llm: LLM) -> None:
    expected = [llm.generate(f"prompt {i}", GREEDY)[0].outputs for i in range(4)]
    results: list[Any] = [None] * 4

    def work(index: int) -> None:
        async def main() -> None:
            outputs = await asyncio.gather(
                *(last(allm.generate(f"prompt {index}", GREEDY)) for _ in range(5))
            )
            results[index] = [output.outputs for output in outputs]

        run(main())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[outputs] * 5 for outputs in expected]


# ---- lifetime ------------------------------------------------------------------------------------


def test_close_ends_the_tasks(target_dir: Path, llm: LLM) -> None:
    async def main() -> None:
        allm = AsyncLLM(target_dir, device="cpu", max_model_len=512, show_progress=False)
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        tasks = [asyncio.create_task(last(allm.generate("a", params))) for _ in range(4)]
        await _until_running(allm.llm, 4)
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
        task = asyncio.create_task(last(shared.generate("a", LONG)))
        await _until_running(llm, 1)
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
    end = time.monotonic() + _TIMEOUT_S
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
