# SPDX-License-Identifier: Apache-2.0
"""Runs examples/cpp-server, and checks its tokens, its errors, its cancellation and its end."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_S = 60
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
# More than a client waits for; the demo's pool has room for them.
LONG = {"max_tokens": 900, "ignore_eos": True, "n": 8}

# By the text that the error has.
MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("not valid JSON", b""),
    ("not valid JSON", b"{"),
    ("no JSON object", b"[1]"),
    ("nested too deeply", b"[" * 100_000),
    ("a field twice", b'{"prompt": [1], "n": 1, "n": 2}'),
    ("not valid JSON", b'{"prompt": [1], "temperature": NaN}'),
    ("not valid JSON", b'{"prompt": [1], "temperature": 1e400}'),
    ("not valid JSON", b'{"prompt": "\xff"}'),
    ("prompt", b"{}"),
    ('prompt is "a"; allowed: a list of token ids', b'{"prompt": "a"}'),
    ("prompt", b'{"prompt": [1.5]}'),
    ("prompt token 0 is -1", b'{"prompt": [-1]}'),
    ("prompt", b'{"prompt": [4294967297]}'),
    ("max_tokens is -1", b'{"prompt": [1], "max_tokens": -1}'),
    ("max_tokens", b'{"prompt": [1], "max_tokens": 99999999999}'),
    ("num_samples is 2000000000", b'{"prompt": [1], "n": 2000000000}'),
    ("top_p is 7", b'{"prompt": [1], "top_p": 7}'),
    ("seed is -1", b'{"prompt": [1], "seed": -1}'),
    ("stream is 1; allowed: true or false", b'{"prompt": [1], "stream": 1}'),
    ('logit_bias is "a"; allowed: token ids', b'{"prompt": [1], "logit_bias": {"a": 1}}'),
    ("logit_bias is 1e+200", b'{"prompt": [1], "logit_bias": {"1": 1e200}}'),
    ("bad_words", b'{"prompt": [1], "bad_words": [1]}'),
    ("cache_salt", b'{"prompt": [1], "cache_salt": ""}'),
    ("cache_salt", b'{"prompt": [1], "cache_salt": "a\\u0000"}'),
    ("speculative", b'{"prompt": [1], "speculative": {"k": 1}}'),
    ("num_speculative_tokens", b'{"prompt": [1], "speculative": {"num_speculative_tokens": -1}}'),
    ("the field tools is not supported", b'{"prompt": [1], "tools": []}'),
)


class CppServer:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        """Takes a process that listens."""
        self.process = process
        self.port = port

    def send(self, method: str, path: str, body: Any = None, headers: Any = JSON) -> Any:
        """Sends a request; returns the response, not yet read, and its connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        return connection

    def ask(self, method: str, path: str, body: Any = None, headers: Any = JSON) -> tuple[int, str]:
        """Sends a request and returns status and body."""
        connection = self.send(method, path, body, headers)
        with contextlib.closing(connection):
            response = connection.getresponse()
            return response.status, response.read().decode()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole completion."""
        status, text = self.ask("POST", COMPLETIONS, body)
        assert status == 200, text
        return json.loads(text)

    def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream."""
        status, text = self.ask("POST", COMPLETIONS, body | {"stream": True})
        assert status == 200, text
        *lines, end, rest = text.split("\n\n")
        assert end == "data: [DONE]" and rest == "", text[-200:]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def figure(self, name: str) -> int:
        """A number of /metrics."""
        found = re.search(rf"^paceline_{name} (\d+)$", self.ask("GET", "/metrics")[1], re.MULTILINE)
        assert found is not None, name
        return int(found[1])

    def wait_until(self, name: str, expected: int) -> None:
        """Waits until a number of /metrics has a value."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.figure(name) != expected:
            assert time.monotonic() < deadline, (name, self.figure(name), expected)
            time.sleep(0.01)


@contextlib.contextmanager
def running(program: Path, folder: Path, *options: str) -> Iterator[CppServer]:
    """Starts a server on a free port."""
    command = [str(program), str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"serving at http://127\.0\.0\.1:(\d+)\n", line)
            assert found is not None, line
            yield CppServer(process, int(found[1]))
        finally:
            process.kill()


def check_tokens(server: CppServer, prompt: list[int], expected: dict[tuple, list[int]]) -> None:
    """Whole and streamed completions have the tokens of Python, by temperature and seed."""
    for (temperature, seed), tokens in expected.items():
        body = {
            "prompt": prompt, "max_tokens": len(tokens), "temperature": temperature, "seed": seed,
        }  # fmt: skip
        whole = server.complete(body)
        (choice,) = whole["choices"]
        assert choice == {"index": 0, "token_ids": tokens, "finish_reason": "length"}, choice
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        assert whole["usage"] == usage | {"total_tokens": len(prompt) + len(tokens)}
        drafts = whole["metrics"]["speculative_decoding"]
        assert drafts["num_accepted_draft_tokens"] <= drafts["num_draft_tokens"]

        *events, end = server.events(body)
        pieces = [event["choices"][0] for event in events]
        assert [token for piece in pieces for token in piece["token_ids"]] == tokens
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [
            "length"
        ]
        assert end["choices"] == [] and end["usage"] == whole["usage"]

    # Each request has its own parameters; samples are those of separate requests.
    temperature, seed = list(expected)[-1]
    tokens = expected[temperature, seed]
    body = {"prompt": prompt, "temperature": temperature, "max_tokens": len(tokens)}
    choices = server.complete(body | {"seed": seed - 1, "n": 2})["choices"]
    assert choices[1]["token_ids"] == tokens and choices[0]["token_ids"] != tokens
    stopped = server.complete(body | {"seed": seed, "stop_token_ids": [tokens[3]]})["choices"][0]
    assert stopped["token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped["finish_reason"] == "stop"
    plain = server.complete(body | {"seed": seed, "speculative": {"enabled": False}})
    assert plain["choices"][0]["token_ids"] == tokens
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    *events, _ = server.events(body | {"seed": seed, "speculative": {"num_speculative_tokens": 1}})
    assert max(len(event["choices"][0]["token_ids"]) for event in events) <= 2
    first, second = (server.complete(body)["choices"][0]["token_ids"] for _ in range(2))
    assert first != second, "without a seed, requests draw different tokens"
    banned = body | {"seed": seed, "logit_bias": {str(tokens[0]): -1e6}}
    assert server.complete(banned)["choices"][0]["token_ids"][0] != tokens[0]


def check_errors(server: CppServer) -> None:
    """Each malformed request gets status 400 at once, and reaches no engine."""
    emitted = server.figure("generation_tokens_total")
    for message, body in MALFORMED:
        started = time.monotonic()
        status, text = server.ask("POST", COMPLETIONS, body)
        error = json.loads(text)["error"]
        assert status == 400 and message in error["message"], (body[:80], status, text)
        assert time.monotonic() - started < 1, body[:80]
    for status, method, path, body, headers in (
        (404, "GET", "/nonesuch", None, {}),
        (404, "GET", COMPLETIONS, None, {}),
        (413, "POST", COMPLETIONS, b" " * (9 << 20), JSON),
        (415, "POST", COMPLETIONS, b'{"prompt": [1]}', {"content-type": "text/plain"}),
    ):
        seen, text = server.ask(method, path, body, headers)
        assert seen == status and json.loads(text)["error"]["message"], (path, seen, text)
    assert server.figure("generation_tokens_total") == emitted
    assert server.ask("GET", "/health") == (200, "")


def check_cancellation(server: CppServer, prompt: list[int]) -> None:
    """A client that goes away frees its blocks, whole or streamed, and harms no other."""
    body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "seed": 1}
    alone = server.complete(body)["choices"]
    for streams in (False, True):
        cancelled = server.figure("requests_cancelled_total")
        with contextlib.closing(
            server.send("POST", COMPLETIONS, {"prompt": prompt, "stream": streams, **LONG})
        ):
            server.wait_until("num_requests_running", 8)
        assert server.complete(body)["choices"] == alone
        server.wait_until("requests_cancelled_total", cancelled + 8)
        server.wait_until("kv_blocks_held", 0)


def check_queue(server: CppServer, prompt: list[int]) -> None:
    """A request beyond the queue gets status 429. Eight outputs run and two requests wait."""
    with contextlib.ExitStack() as stack:

        def send(body: dict[str, Any]) -> Any:
            connection = server.send("POST", COMPLETIONS, body)
            return stack.enter_context(contextlib.closing(connection))

        send({"prompt": prompt, **LONG})
        server.wait_until("num_requests_running", 8)
        for _ in range(2):
            send({"prompt": prompt})
        server.wait_until("num_requests_waiting", 2)
        response = send({"prompt": prompt}).getresponse()
        assert response.status == 429 and response.getheader("retry-after") == "1"
    server.wait_until("num_requests_waiting", 0)
    server.wait_until("kv_blocks_held", 0)
    assert server.complete({"prompt": prompt})["choices"][0]["token_ids"]


def check_end(server: CppServer, prompt: list[int]) -> None:
    """SIGTERM lets a request end and refuses others; the exit code is 0."""
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "seed": 1}
    alone = server.complete(body)["choices"]
    results: list[Any] = []
    client = threading.Thread(target=lambda: results.append(server.complete(body)["choices"]))
    client.start()
    server.wait_until("num_requests_running", 1)
    server.process.send_signal(signal.SIGTERM)
    while not results and server.ask("GET", "/health")[0] == 200:
        time.sleep(0.001)
    if not results:
        assert server.ask("POST", COMPLETIONS, {"prompt": prompt})[0] == 503
    client.join(TIMEOUT_S)
    assert results == [alone]
    assert server.process.wait(TIMEOUT_S) == 0


def check_arguments(program: Path, folder: Path) -> None:
    """Wrong arguments are refused by name."""
    for arguments, message in (
        ((), "FOLDER is missing"),
        ((folder, "--port", "70000"), "--port is 70000; allowed: an integer from 0 to 65535"),
        ((folder, "--device", "tpu"), "--device tpu is unknown"),
        ((folder, "--port"), "--port has no value"),
    ):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and message in done.stderr, (arguments, done)
    done = subprocess.run([program, "/nonesuch"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "/nonesuch" in done.stderr, done


def check_server(
    program: Path, folder: Path, prompt: list[int], expected: dict[tuple, list[int]]
) -> None:
    """Checks all of a server.

    Args:
        program: The server.
        folder: The model.
        prompt: Token ids.
        expected: By temperature and seed, the tokens of Python.
    """
    check_arguments(program, folder)
    with running(program, folder) as server:
        check_tokens(server, prompt, expected)
        check_errors(server)
        check_cancellation(server, prompt)
        check_end(server, prompt)
    with running(program, folder, "--max-num-seqs", "8", "--max-queue", "2") as server:
        check_queue(server, prompt)


if __name__ == "__main__":
    sys.exit("check_install.py runs these checks")
