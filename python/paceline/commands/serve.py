# SPDX-License-Identifier: Apache-2.0
"""`paceline serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import os
import shlex
from typing import TYPE_CHECKING, Any, Final

from paceline.background_log import BackgroundHandler, start_background_log
from paceline.capture import DEFAULT_MAX_BYTES, MAX_MAX_BYTES, MIN_MAX_BYTES, Capture
from paceline.checks import check_finite, check_int, check_path, check_text, shorten
from paceline.commands.flags import MAX_REPLICAS, add_command
from paceline.commands.options import model_arguments
from paceline.commands.vllm_flags import words_of
from paceline.console import EXIT_OK
from paceline.limits import MAX_INT, MAX_NUM_SEQS
from paceline.option_schema import given_options

if TYPE_CHECKING:
    import socket

    from paceline.async_llm import AsyncLLM
    from paceline.server.service import Service

_logger = logging.getLogger("paceline")

_MAX_TIMEOUT_S: Final = 86_400
_DEMO_NAME: Final = "paceline-demo"


def add_parser(commands: Any) -> None:
    """Adds `serve` to the command line's subparsers."""
    parser = add_command(commands, "serve", _run_serve)
    parser.set_defaults(run=functools.partial(_run_serve, parser))


def parser_of_options() -> argparse.ArgumentParser:
    """Makes a parser of the command's options alone."""
    commands = argparse.ArgumentParser().add_subparsers()
    add_parser(commands)
    parser: argparse.ArgumentParser = commands.choices["serve"]
    return parser


def _run_serve(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    for package in ("starlette", "prometheus_client", "uvicorn", "yaml"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"`paceline serve` needs the package {package}: pip install 'paceline[server]'"
            )
    from paceline.server.settings import read_options

    words = shlex.split(args.command_line)
    args = read_options(parser, words[words.index("serve") + 1 :], os.environ)
    check_options(args)
    check_salts(args)
    arguments = llm_arguments(args)
    log = start_background_log(
        args.log_level.upper(), "%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Its lines repeat ours, and its warnings, one for each malformed request, could fill a disk.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    from paceline.server.sockets import (
        is_loopback,
        max_connections,
        open_socket,
        raise_file_limit,
    )

    flags: dict[str, Any] = getattr(args, "vllm_flags", {})
    if flags:
        _logger.info("flags that change nothing (docs/from-vllm.md): %s", words_of(flags))

    args.max_connections = max_connections(args.max_connections, raise_file_limit())
    with open_socket(args.host, args.port) as opened:
        if not args.api_key and not is_loopback(opened):
            raise ValueError(
                f"--host is {args.host}, which other machines can reach; allowed without an "
                "--api-key (or PACELINE_API_KEY): 127.0.0.1"
            )
        if args.capture is not None:
            # What is wrong with the folder then costs no loading.
            Capture(args.capture, max_bytes=args.capture_max_bytes).close()
        from paceline.async_llm import AsyncLLM
        from paceline.prompt_values import check_layers

        if args.replicas == 1:
            allm = AsyncLLM(**arguments)
        else:
            from paceline.replicas.replicated_llm import start_replicas

            allm = AsyncLLM.from_llm(
                start_replicas(args.replicas, arguments, log_level=args.log_level.upper())
            )
        try:
            if args.capture is not None:
                layers = args.capture_hidden_layers
                if layers is not None:
                    num_layers = len(allm.llm.target.config["layers"])
                    check_layers(layers, num_layers, "--capture-hidden-layers")
                allm.llm.start_capture(
                    args.capture, max_bytes=args.capture_max_bytes, hidden_layers=layers
                )
            _serve(args, allm, opened, log)
        finally:
            allm.close()
            allm.llm.close()
    return EXIT_OK


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """As `model_arguments`, with the options that only this command has."""
    return {
        "tokenizer": args.tokenizer,
        "load_format": args.load_format,
        **given_options(args, "serve"),
        **model_arguments(args),
    }


def check_options(args: argparse.Namespace) -> None:
    """Checks what can be wrong before a model is loaded.

    Raises:
        ValueError: An option is not allowed.
    """
    if args.model_tag is not None and args.model not in (None, args.model_tag):
        raise ValueError(
            f"the model is {shorten(args.model_tag)} and --model is {shorten(args.model)}; "
            "allowed: one of them"
        )
    args.model = args.model_tag if args.model is None else args.model
    check_int("--port", args.port, 0, 65535)
    check_int("--replicas", args.replicas, 1, MAX_REPLICAS)
    check_int("--max-num-seqs", args.max_num_seqs, 1, MAX_NUM_SEQS)
    if args.allow_drafter_changes and args.replicas != 1:
        raise ValueError(
            f"--allow-drafter-changes is given with --replicas {args.replicas}; allowed: changes "
            "of one engine, in the server's process. Start the replicas again with another "
            "--speculative-config"
        )
    if args.max_queue is not None:
        check_int("--max-queue", args.max_queue, 0, MAX_INT)
    check_int("--max-body-bytes", args.max_body_bytes, 1024, MAX_INT)
    if args.capture is not None:
        check_path("--capture", args.capture, "a folder")
        if args.capture_hidden_layers is not None and args.replicas != 1:
            raise ValueError(
                f"--capture-hidden-layers is given with --replicas {args.replicas}; allowed: "
                "hidden states of one engine, in the server's process"
            )
        if args.capture_max_bytes is None:
            args.capture_max_bytes = DEFAULT_MAX_BYTES
        check_int("--capture-max-bytes", args.capture_max_bytes, MIN_MAX_BYTES, MAX_MAX_BYTES)
    else:
        for name in ("capture_max_bytes", "capture_hidden_layers"):
            if getattr(args, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is given without --capture; allowed: both")
    for name, least in (("read_timeout", 0.001), ("drain_timeout", 0.0)):
        option, value = "--" + name.replace("_", "-"), getattr(args, name)
        allowed = f"seconds from {least:g} to {_MAX_TIMEOUT_S}"
        if not least <= check_finite(option, value, allowed) <= _MAX_TIMEOUT_S:
            raise ValueError(f"{option} is {value:g}; allowed: {allowed}")
    for key in args.api_key or ():
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("--api-key has other characters than printable ASCII without spaces")
        if key == "":
            raise ValueError("--api-key is empty; allowed: a key or several, or leave it out")
    if args.cors_origin is not None:
        from paceline.server.cors import check_origins

        check_origins(args.cors_origin)
    if args.otlp_traces_endpoint is not None:
        from paceline.server.traces import check_endpoint

        check_endpoint(args.otlp_traces_endpoint)
    for name in args.served_model_name or ():
        if check_text("--served-model-name", name) == "":
            raise ValueError("--served-model-name is ''; allowed: names that are not empty")


def check_salts(args: argparse.Namespace) -> None:
    """Checks that there are keys if they are salts.

    Raises:
        ValueError: There are none.
    """
    if args.cache_salt_by_key and not args.api_key:
        raise ValueError(
            "--cache-salt-by-key is given, but no --api-key (or PACELINE_API_KEY); allowed: both, "
            "or neither"
        )


def make_service(args: argparse.Namespace, allm: AsyncLLM) -> Service:
    """Makes what is served of the options and a model that is loaded."""
    from paceline.server.service import DEFAULT_MAX_CONNECTIONS, Limits, Service
    from paceline.server.traces import open_traces, process_traces

    endpoint = args.otlp_traces_endpoint
    return Service(
        allm,
        args.served_model_name or [args.model or _DEMO_NAME],
        limits=Limits(
            max_queue=args.max_queue,
            max_body_bytes=args.max_body_bytes,
            read_timeout_s=args.read_timeout,
            max_connections=args.max_connections or DEFAULT_MAX_CONNECTIONS,
        ),
        api_keys=args.api_key or (),
        cors_origins=args.cors_origin or (),
        salts_by_key=args.cache_salt_by_key,
        shows_cached_tokens=args.enable_prompt_tokens_details,
        allows_drafter_changes=args.allow_drafter_changes,
        has_vllm_metrics=args.metrics_compat == "vllm",
        tool_call_parser=args.tool_call_parser,
        has_access_log=args.access_log,
        traces=process_traces() if endpoint is None else open_traces(endpoint),
    )


def _serve(
    args: argparse.Namespace, allm: AsyncLLM, opened: socket.socket, log: BackgroundHandler
) -> None:
    from paceline.server.run import Server

    service = make_service(args, allm)
    host, port = opened.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def on_ready() -> None:
        if not args.quiet:
            base = f"http://{shown}:{port}"
            log.tell(f"paceline: serving {service.names[0]} at {base}/v1, with a page at {base}/")

    server = Server(
        service,
        opened,
        drain_timeout_s=args.drain_timeout,
        on_ready=on_ready,
    )
    try:
        server.run(handles_signals=True)
    finally:
        service.close()
