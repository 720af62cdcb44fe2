# SPDX-License-Identifier: Apache-2.0
"""Options of `paceline serve`: command line before environment before file; and its processes."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.commands.vllm_flags import refusals, take_flags
from paceline.console import EXIT_OK, EXIT_USAGE
from paceline.server.settings import read_options
from paceline.vllm_arguments import ADVICE, FLAGS
from running_server import JSON, read_events
from time_limits import HANG_LIMIT_S


def serve_parser() -> argparse.ArgumentParser:
    (commands,) = (
        action
        for action in cli.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parser = commands.choices["serve"]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def read(*arguments: str, **environment: str) -> argparse.Namespace:
    return read_options(serve_parser(), arguments, environment)


def test_the_command_line_comes_before_environment_and_file(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        "model: from-file\nmax-num-seqs: 3\nmax_queue: 5\nport: 1\naccess-log: true\n"
        "served-model-name: [a, b]\nread-timeout: 1.5\n"
        "speculative-config:\n  method: ngram\n  num_speculative_tokens: 2\n"
    )
    args = read("--config", str(config), "--port", "3", PACELINE_PORT="2", PACELINE_MAX_QUEUE="6")
    assert (args.model, args.max_num_seqs, args.max_queue, args.port) == ("from-file", 3, 6, 3)
    assert args.access_log is True and args.served_model_name == ["a", "b"]
    assert args.read_timeout == 1.5 and args.seed == 0 and args.host == "127.0.0.1"
    assert json.loads(args.speculative_config) == {"method": "ngram", "num_speculative_tokens": 2}
    # The file itself, and what it has, can come from the environment.
    args = read(PACELINE_CONFIG=str(config), PACELINE_ACCESS_LOG="false", PACELINE_MODEL="other")
    assert args.access_log is False and args.model == "other" and args.max_num_seqs == 3
    assert args.enable_prefix_caching is True
    assert read("--no-enable-prefix-caching").enable_prefix_caching is False
    assert read(PACELINE_ENABLE_PREFIX_CACHING="0").enable_prefix_caching is False
    args = read("--enable-prefix-caching", PACELINE_ENABLE_PREFIX_CACHING="false")
    assert args.enable_prefix_caching is True
    assert read(PACELINE_SERVED_MODEL_NAME="x y").served_model_name == ["x", "y"]


def test_each_option_has_a_variable() -> None:
    values = {"log_level": "debug", "metrics_compat": "vllm", "tool_call_parser": "none"}
    parser = serve_parser()
    for action in parser._actions:
        if action.dest in ("help", "config", "model_tag"):
            continue
        text = "1" if action.nargs == 0 else values.get(action.dest, "7")
        read_value = getattr(read(**{f"PACELINE_{action.dest.upper()}": text}), action.dest)
        # The default, which is not what was given, would be wrong.
        expected: Any = True if action.nargs == 0 else text
        if action.type is not None:
            expected = action.type(text)  # type: ignore[operator]
        assert read_value == ([expected] if action.nargs == "+" else expected), action.dest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-num-seq: 3", "unknown key 'max-num-seq'; did you mean max-num-seqs"),
        ("config: x", "unknown key 'config'"),
        ("max-num-seqs: many", "max-num-seqs: 'many' is not an integer"),
        ("max-num-seqs: [1]", "allowed: a number or a text"),
        ("access-log: 7", "allowed: true or false"),
        ("log-level: loud", "allowed: debug, info, warning, error"),
        ("served-model-name: {}", "allowed: one value or several"),
        ("- a", "allowed: one option in each line"),
        ("a: [", "is not valid YAML"),
        ("x: !!python/object/apply:os.system [ls]", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused(content: str, message: str, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read("--config", str(config))


def test_a_wrong_variable_is_refused() -> None:
    with pytest.raises(ValueError, match="the environment variable PACELINE_PORT: 'x' is not an"):
        read(PACELINE_PORT="x")


def serve(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", "--max-model-len", "512", *arguments],
        env=inherited | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"paceline: serving (\S+) at http://127\.0\.0\.1:(\d+)/v1", line)
        if found:
            return int(found[2])
    raise AssertionError("the server did not start")


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextlib.contextmanager
def streaming(
    *arguments: str, max_tokens: int, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], http.client.HTTPResponse]]:
    """A server and a stream of 16 outputs that has begun."""
    with serve("--port", "0", *arguments, PACELINE_API_KEY="k", **environment) as process:
        try:
            port = port_of(process)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_LIMIT_S)
            body = {
                "model": "paceline-demo",
                "prompt": "def f",
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "n": 16,
                "stream_options": {"include_usage": True},
            }
            headers = JSON | {"authorization": "Bearer k"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200
            yield process, response
        finally:
            process.kill()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_process_serves_and_drains(number: signal.Signals) -> None:
    """Without a model it serves a demo. A signal lets a stream end, and the exit code is 0."""
    with streaming(max_tokens=500) as (process, response):
        process.send_signal(number)
        *_, end = read_events(response)
        assert end["usage"]["completion_tokens"] == 16 * 500
        assert process.wait(HANG_LIMIT_S) == EXIT_OK
        assert process.stderr is not None
        assert "Press Ctrl-C again, or send a second signal, to end" in process.stderr.read()


def test_a_hang_up_ends_streams_with_an_error_after_the_drain_timeout() -> None:
    with streaming("--drain-timeout", "0", max_tokens=500) as (process, response):
        process.send_signal(signal.SIGHUP)
        *_, end = read_events(response)
        assert end["error"]["message"] == "the server was closed while a request was running"
        assert process.wait(HANG_LIMIT_S) == EXIT_OK


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    script = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "from paceline.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "serve", "--port", "0", "--max-model-len", "128"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = port_of(process)
            process.send_signal(signal.SIGHUP)
            for _ in range(5):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_LIMIT_S)
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_LIMIT_S) == EXIT_OK
        finally:
            process.kill()


def test_origins_come_from_one_option_or_several(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("cors-origin: [http://file.org]\n")
    in_file = ("--config", str(config))
    assert read(*in_file).cors_origin == ["http://file.org"]
    assert read(PACELINE_CORS_ORIGIN="http://a http://b").cors_origin == ["http://a", "http://b"]
    given = ("--cors-origin", "http://a", "--cors-origin", "http://b", "http://c")
    assert read(*in_file, *given).cors_origin == ["http://a", "http://b", "http://c"]
    assert read().cors_origin is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "allowed without an --api-key"),
        (("--api-key", ""), "--api-key is empty"),
        (("--api-key", "a b"), "printable ASCII without spaces"),
        (("--cache-salt-by-key",), "--cache-salt-by-key is given, but no --api-key"),
        (("--cors-origin", "example.org"), "--cors-origin is 'example.org'; allowed: an origin"),
        (("--cors-origin", "https://example.org/page"), "--cors-origin is"),
        (("--cors-origin", "https://a.org", "HTTPS://B.org"), "--cors-origin is 'HTTPS://B.org'"),
        (("--cors-origin", "http://a:x"), "--cors-origin is"),
        (("--cors-origin", "null"), "--cors-origin is"),
        (("--port", "70000"), "--port is 70000; allowed: an integer from 0 to 65535"),
        (("--max-num-seqs", "0"), "--max-num-seqs is 0"),
        (("--drain-timeout", "-1"), "--drain-timeout is -1"),
        (("a", "--model", "b"), "allowed: one of them"),
        (("--host", "no host"), "allowed: a name or an address"),
        (("--config", "nonesuch.yaml"), "nonesuch.yaml: No such file"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments]) != EXIT_OK
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == EXIT_USAGE
    assert "choose another --host or --port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype fp8: leave it out: the KV has the dtype"]),
        (["--enable-lora"], ["--enable-lora: leave it out: LoRA"]),
        (["--download-dir=d"], ["--download-dir d: cache_dir names the folder"]),
        (["--ssl-keyfile", "k", "a"], ["put a proxy with TLS before it"]),
        (["--max-num-sqs=3"], ["unrecognized arguments: ", "did you mean --max-num-seqs"]),
        (
            [
                *("--quantization", "awq", "--swap-space", "4", "--dtype", "half", "--foo"),
                *("--pipeline-parallel-size", "2"),
            ],
            [
                "unrecognized arguments: --foo; ",
                "--quantization awq: leave it out: the checkpoint's config.json",
                "--pipeline-parallel-size 2: leave it out: tensor_parallel_size alone divides",
                "--dtype half: 'auto' loads a checkpoint in float16 as float32",
            ],
        ),
    ],
)
def test_flags_of_vllm_that_would_change_something_are_refused_together(
    flags: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "m", *flags])
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert [part for part in parts if part not in error] == []


def test_every_flag_of_vllm_has_its_advice() -> None:
    own = [option for action in serve_parser()._actions for option in action.option_strings]
    for name, advice in (ADVICE["LLM"] | FLAGS).items():
        flag = "--" + name.replace("_", "-")
        if flag in own:
            assert name in ("data_parallel_size", "num_speculative_tokens")  # of other options
            continue
        words = [flag] if advice.is_switch else [flag, "another"]
        rest, given = take_flags(["m", *words, "--port", "1"], own)
        assert rest == ["m", "--port", "1"] and list(given) == [name]
        refused = refusals(given, {})
        assert list(refused.values()) == ([] if advice.accepts(given[name]) else [advice.plain])


def test_flags_of_vllm_that_change_nothing_are_accepted() -> None:
    words = [
        *("--trust-remote-code", "--enforce-eager", "--swap-space", "4", "--disable-log-requests"),
        *("--no-enable-chunked-prefill", "--kv-cache-dtype", "auto", "--pipeline-parallel-size=1"),
        *(
            "--quantization",
            "None",
            "--limit-mm-per-prompt.image",
            "0",
            "--enable-auto-tool-choice",
        ),
    ]
    plain = ["m", "--tensor-parallel-size", "1", "--served-model-name", "a", "--dtype", "auto"]
    for arguments in ([*plain, *words], [*words, *plain], [*plain[:1], *words, *plain[1:]]):
        args = cli.build_parser().parse_args(["serve", *arguments])
        assert (args.model_tag, args.served_model_name) == ("m", ["a"])
        assert args.vllm_flags == {
            "trust_remote_code": True, "enforce_eager": True, "swap_space": 4,
            "disable_log_requests": True, "enable_chunked_prefill": False,
            "kv_cache_dtype": "auto", "pipeline_parallel_size": 1, "quantization": None,
            "limit_mm_per_prompt": 0, "enable_auto_tool_choice": True,
        }  # fmt: skip


def test_a_server_lists_the_flags_that_change_nothing() -> None:
    flags = ("--trust-remote-code", "--swap-space", "4", "--gpu-memory-utilization", "0.9")
    with serve("--port", "0", "--device", "cpu", *flags) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "paceline: serving" in line:
                    break
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_LIMIT_S) == EXIT_OK
        finally:
            process.kill()
    log = "".join(lines)
    assert (
        "flags that change nothing (docs/from-vllm.md): --trust-remote-code, --swap-space 4" in log
    )
    assert "arguments that change nothing (docs/from-vllm.md): gpu_memory_utilization=0.9" in log


def test_a_key_of_vllm_in_the_file_gets_advice(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("quantization: awq\n")
    with pytest.raises(ValueError, match="unknown key 'quantization'; leave it out: the checkpoi"):
        read_options(serve_parser(), ["--config", str(path)], {})
