# SPDX-License-Identifier: Apache-2.0
"""Ends one of two replicas in mid-stream, each on GPUs of its own.

    check_replicas.py [--device cuda] [--port P] [-tp N]

`paceline serve` with one engine of one rank says what is expected. The same streams then run on
`paceline serve --replicas 2 -tp N`, and a replica that runs some of them gets SIGKILL. Every stream
must end with the same tokens. With --device cuda the driver must see each replica on N GPUs that no
other has, and the process that speaks HTTP on none. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S = 120.0
NUM_STREAMS = 16


@contextlib.contextmanager
def served(args: argparse.Namespace, *options: str) -> Iterator[int]:
    """`paceline serve` with the demo, until the `with` block ends; yields its process id."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "paceline", "serve", "--device", args.device, "--port",
            str(args.port), "--max-model-len", "512", "--max-num-seqs", str(NUM_STREAMS), "--quiet",
            *options,
        ]
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{args.port}/health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def stream(port: int, number: int, on_tokens: Any) -> list[int]:
    """Sends request `number`; returns the token ids of its stream.

    Args:
        port: Of the server, on this machine.
        number: Sets the temperature, the seed and the length.
        on_tokens: Called with the number of tokens of every chunk.
    """
    body: dict[str, Any] = {
        "prompt": f"def read_{number}(path):",
        "temperature": number % 3 / 2,
        "seed": number,
        "max_tokens": 300 + 4 * number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.request("GET", "/v1/models")
    body["model"] = json.load(connection.getresponse())["data"][0]["id"]
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    tokens: list[int] = []
    for line in response:
        text = line.decode().strip().removeprefix("data: ")
        if not text or text == "[DONE]":
            continue
        event = json.loads(text)
        if "choices" not in event:
            raise SystemExit(f"stream {number} ended with {text}")
        for choice in event["choices"]:
            tokens += choice["token_ids"]
            on_tokens(len(choice["token_ids"]))
    connection.close()
    return tokens


def all_streams(port: int, on_tokens: Any) -> list[list[int]]:
    """The tokens of all streams, which run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda number: stream(port, number, on_tokens), range(NUM_STREAMS)))


def gpu_processes() -> dict[int, set[str]]:
    """The GPUs of every process that the driver sees on one."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    places: dict[int, set[str]] = {}
    for line in subprocess.check_output(query, text=True).splitlines():
        if "," in line:
            process, gpu = line.split(",")
            places.setdefault(int(process), set()).add(gpu.strip())
    return places


def replicas_of(server: int) -> list[int]:
    """The processes that a server has started and that hold a model."""
    children = Path(f"/proc/{server}/task").glob("*/children")
    found = [int(number) for path in children for number in path.read_text().split()]
    return [
        number
        for number in found
        if "paceline.replicas" in Path(f"/proc/{number}/cmdline").read_text()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()

    with served(args):
        expected = all_streams(args.port, lambda count: None)
    num_ranks = args.tensor_parallel_size
    with served(args, "--replicas", "2", "-tp", str(num_ranks)) as server:
        replicas = replicas_of(server)
        if len(replicas) != 2:
            print(f"the server has {len(replicas)} replicas, expected 2")
            return 1
        if args.device != "cpu":
            places = gpu_processes()
            found_on = [places.get(one, set()) for one in replicas]
            print(f"replicas on GPUs: {[sorted(gpus) for gpus in found_on]}")
            if [len(gpus) for gpus in found_on] != [num_ranks] * 2 or found_on[0] & found_on[1]:
                print(f"each replica must be on {num_ranks} of its own; the driver sees {places}")
                return 1
            if server in places:
                print(f"the process that speaks HTTP is on {sorted(places[server])}, expected none")
                return 1
        lock = threading.Lock()
        seen = 0

        def count_tokens(number: int) -> None:
            nonlocal seen
            with lock:
                before, seen = seen, seen + number
                if before < 1500 <= seen:
                    os.kill(replicas[0], signal.SIGKILL)

        found = all_streams(args.port, count_tokens)
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{args.port}/metrics").read().decode()
    resumed = [line for line in metrics.splitlines() if "resumed" in line and line[0] != "#"]
    differing = sum(one != other for one, other in zip(found, expected, strict=True))
    print(f"{NUM_STREAMS} streams, {sum(map(len, found))} tokens, {differing} streams differ")
    print(*resumed, sep="\n")
    if not any(float(line.split()[-1]) > 0 for line in resumed):
        print("no stream was resumed, so none was lost")
        return 1
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
