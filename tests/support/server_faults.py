# SPDX-License-Identifier: Apache-2.0
"""A server whose engine runs out of memory; run with failing_new.cc as LD_PRELOAD.

Usage: server_faults.py LAST STEP

For i = 1, 1 + STEP, ... up to LAST, the i-th allocation of the engine's thread fails while requests
run: each of them ends, and the next hundred get what they always get.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from running_server import RunningServer, open_demo, read_events

COMPLETIONS = "/v1/completions"
# After how many faults the next hundred requests are compared one by one.
CHECK_EVERY = 10

faults = ctypes.CDLL(None)
faults.fail_allocation.argtypes = (ctypes.c_int, ctypes.c_long)
faults.fail_allocation.restype = ctypes.c_long


def fail(thread: int, n: int) -> int:
    return int(faults.fail_allocation(thread, n))


def bodies() -> list[dict[str, Any]]:
    """More outputs than run at once, with everything that makes the engine allocate."""
    return [
        {
            "prompt": f"def f{i}(" + "x, " * (3 * i),
            "max_tokens": 6 + i,
            "temperature": i % 2,
            "seed": i,
            "n": 1 + i % 3,
            "stream": i % 4 < 2,
            "return_token_ids": True,
        }
        | ({"logprobs": 2, "bad_words": ["self", "return x"]} if i % 3 == 0 else {})
        | ({"logit_bias": {"199": -5}, "presence_penalty": 0.5} if i % 3 == 1 else {})
        for i in range(16)
    ]


def ask(server: RunningServer, body: dict[str, Any]) -> tuple[dict[int, list[int]], str | None]:
    """The tokens of a request by output, and the error that has ended it."""
    tokens: dict[int, list[int]] = {}
    with server.send(COMPLETIONS, body) as response:
        if response.status != 200:
            assert response.status in (500, 503), response.status
            return {}, response.read().decode()
        if not body["stream"]:
            import json

            answers = [json.loads(response.read())]
        else:
            answers = list(read_events(response))
    for answer in answers:
        if "error" in answer:
            return tokens, answer["error"]["message"]
        for choice in answer["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    return tokens, None


def main() -> None:
    last, step = int(sys.argv[1]), int(sys.argv[2])
    requests = bodies()
    num_runs = num_reached = num_ended = num_whole = 0
    with (
        open_demo(max_num_seqs=3, max_model_len=256, num_threads=1) as llm,
        RunningServer(llm, max_queue=100) as server,
        ThreadPoolExecutor(len(requests)) as pool,
    ):
        engine_thread = faults.count_threads() - 1  # an engine starts its own thread last
        expected = [ask(server, body) for body in requests]
        assert all(error is None for _, error in expected)

        def check_next_hundred() -> None:
            server.wait_until_idle()
            order = itertools.islice(itertools.cycle(range(len(requests))), 100)
            for index, seen in pool.map(lambda i: (i, ask(server, requests[i])), order):
                assert seen == expected[index], index

        for n in range(1, last + 1, step):
            fail(engine_thread, n)
            seen = list(pool.map(lambda body: ask(server, body), requests))
            num_reached += fail(-1, 0)
            num_runs += 1
            for (tokens, error), (whole, _) in zip(seen, expected, strict=True):
                if error is None:
                    assert tokens == whole, n
                    num_whole += 1
                    continue
                num_ended += 1
                assert "memory" in error, (n, error)
                for index, some in tokens.items():  # what was delivered is right
                    assert whole[index][: len(some)] == some, n
            assert server.ask("/health")[0] == 200, n
            if num_runs % CHECK_EVERY == 0:
                check_next_hundred()
        check_next_hundred()
        print(f"{num_runs} runs, {num_reached} faults: {num_ended} requests failed")
        assert num_reached > 0.9 * num_runs and num_ended > num_runs / 2 < num_whole
    print("ended")


if __name__ == "__main__":
    main()
