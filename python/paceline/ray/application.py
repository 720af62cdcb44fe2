# SPDX-License-Identifier: Apache-2.0
"""The application: a deployment that speaks HTTP, and one whose replicas have engines."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from paceline.async_llm import AsyncLLM
from paceline.checks import shorten, wrong_value
from paceline.commands.serve import (
    check_options,
    check_salts,
    llm_arguments,
    make_service,
    parser_of_options,
)
from paceline.ray.engine import Engine
from paceline.ray.executor import RayExecutor
from paceline.ray.router import PrefixRequestRouter
from paceline.replicas.messages import Facts
from paceline.replicas.replicated_llm import ReplicatedLLM
from paceline.server.app import make_app
from paceline.server.bodies import Receive
from paceline.server.connection import Send
from paceline.server.guard import App, Scope
from paceline.server.service import QUEUE_FACTOR
from paceline.server.settings import read_mapping

ENGINES: Final = "engines"
SERVERS: Final = "servers"
# What Ray does, by option of `paceline serve`.
_RAYS: Final = {
    "host": "http_options of Ray Serve has the host",
    "port": "http_options of Ray Serve has the port",
    "replicas": "engines has num_replicas, or autoscaling_config",
    "data_parallel_size": "engines has num_replicas, or autoscaling_config",
    "read_timeout": "Ray's proxy reads requests",
    "drain_timeout": "engines and servers have graceful_shutdown_timeout_s",
    "config": "give its options themselves",
    "capture": "its servers may be on several machines; `paceline serve` captures to a folder",
    "capture_max_bytes": "there is no capture",
    "capture_hidden_layers": "there is no capture",
    "allow_drafter_changes": "its engines keep their drafter; deploy it again with another one",
}
# Blocks that a router remembers of each replica: of one million tokens with blocks of 16.
_MAX_BLOCKS: Final = 65_536


def build_app(options: Mapping[str, Any]) -> Application:
    """Builds the application; the target of `serve run paceline.ray:build_app KEY=VALUE`.

    Args:
        options: The options of `paceline serve` by name, such as {"model": ...,
            "speculative-config": {...}, "max-num-seqs": 32}, without those of Ray's proxy. Under
            "engines" and "servers" it may have arguments of `ray.serve.deployment` for each of the
            two deployments, such as num_replicas, autoscaling_config, ray_actor_options and
            graceful_shutdown_timeout_s. An engine has a GPU for each of its ranks by default, all
            on one host, if `device` is not "cpu" and a model is given.

    Returns:
        The application.

    Raises:
        ValueError: An option is unknown, not allowed, or Ray's.
    """
    given = dict(options)
    engines, servers = (_deployment_options(given, name) for name in (ENGINES, SERVERS))
    for key in given:
        if (name := str(key).replace("-", "_")) in _RAYS:
            raise ValueError(
                f"{shorten(key)} is not an option of the Ray application: {_RAYS[name]}"
            )
    args = read_mapping(parser_of_options(), given, "the Ray application")
    check_options(args)
    arguments = llm_arguments(args) | {"show_progress": False}
    num_running = args.max_num_seqs
    waiting = QUEUE_FACTOR * num_running if args.max_queue is None else args.max_queue
    num_gpus = 0 if arguments["device"] == "cpu" else arguments["tensor_parallel_size"]
    engine_options: dict[str, Any] = {
        "max_ongoing_requests": num_running + waiting,
        "ray_actor_options": {"num_gpus": num_gpus},
        "request_router_config": RequestRouterConfig(
            request_router_class=PrefixRequestRouter,
            request_router_kwargs={
                "block_size": arguments["block_size"],
                "max_blocks": _MAX_BLOCKS,
                "max_num_seqs": num_running,
            },
        ),
    } | engines
    max_replicas = _max_replicas(engine_options)
    server_options: dict[str, Any] = {
        "max_ongoing_requests": max_replicas * engine_options["max_ongoing_requests"],
    } | servers
    deployment = serve.deployment(**server_options)(serve.ingress()(Server))
    engine = serve.deployment(**engine_options)(Engine)
    return deployment.bind(engine.bind(arguments), args, max_replicas)


def _deployment_options(given: dict[str, Any], name: str) -> dict[str, Any]:
    value = given.pop(name, {})
    if not isinstance(value, Mapping):
        raise wrong_value(
            name, value, 'arguments of ray.serve.deployment, such as {"num_replicas": 2}'
        )
    return dict(value)


def _max_replicas(engine_options: Mapping[str, Any]) -> int:
    """The most engines that there can be."""
    scaling = engine_options.get("autoscaling_config")
    if scaling is None:
        return int(engine_options.get("num_replicas", 1))
    most = scaling.get("max_replicas") if isinstance(scaling, Mapping) else scaling.max_replicas
    return int(most or 1)


class Server:
    """Speaks HTTP, and has the text of requests; see `ReplicatedLLM`."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engines: DeploymentHandle, args: argparse.Namespace, max_replicas: int
    ) -> None:
        """Waits for an engine.

        Args:
            engines: The deployment of `Engine`.
            args: The options.
            max_replicas: The most replicas that it can have.
        """
        # Read here, so that it is in the environment of the servers and nowhere else.
        args.api_key = args.api_key or os.environ.get("PACELINE_API_KEY", "").split()
        check_options(args)
        check_salts(args)
        facts: Facts = await engines.facts.remote()
        logging.getLogger("paceline").setLevel(args.log_level.upper())
        executor = RayExecutor(engines, facts, max_replicas=max_replicas)
        self._llm = ReplicatedLLM(executor, facts)
        self._service = make_service(args, AsyncLLM.from_llm(self._llm))

    def __serve_build_asgi_app__(self) -> App:
        """Returns the application; called by Ray."""
        return _Lifespan(make_app(self._service), self._service.close)

    async def check_health(self) -> None:
        """Raises an error if no request can run, so that Ray replaces the replica."""
        self._service.check_running()


class _Lifespan:
    """Answers what Ray says at the start and at the end, and hides Ray's route prefix."""

    def __init__(self, app: App, close: Callable[[], None]) -> None:
        """Takes an application, and what ends it once it serves nothing any more."""
        self._app = app
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            prefix = scope.get("root_path", "")
            path = scope["path"].removeprefix(prefix) or "/"
            raw_path = scope.get("raw_path") or scope["path"].encode()
            inner = {**scope, "path": path, "root_path": "", "raw_path": raw_path}
            await self._app(inner, receive, send)
        elif scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await asyncio.to_thread(self._close)  # sends the last spans, which may take long
            await send({"type": "lifespan.shutdown.complete"})
