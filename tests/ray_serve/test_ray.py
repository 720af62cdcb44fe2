# SPDX-License-Identifier: Apache-2.0
"""The Ray Serve application on one machine with two CPU replicas. `make test-ray` runs it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from ray.util import list_named_actors

from paceline import LLM, SamplingParams
from paceline.ray import build_app
from paceline.ray.application import _Lifespan
from running_server import open_demo

ROOT = Path(__file__).parents[2]
SERVE = "serve run examples/ray/demo.yaml"  # as docs/replicas.md says
COMPLETIONS = "/v1/completions"
PROMPT = "def read_lines(path):"
TIMEOUT_S = 60


class Client:
    """Sends requests to the application."""

    def send(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        connection.request(method, path, data, {"content-type": "application/json"})
        return connection.getresponse()

    def result(self, path: str, body: Any = None) -> Any:
        response = self.send(path, body)
        text = response.read()
        assert response.status == 200, text
        return json.loads(text)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def engines() -> dict[str, int]:
    """The process of each engine, by the name of its replica."""
    found = {}
    for actor in list_named_actors(all_namespaces=True):
        _, _, name = actor["name"].partition("#Engine#")
        if name:
            handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
            found[name] = ray.get(handle.__ray_call__.remote(lambda _: os.getpid()))
    return found


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    program = Path(sys.executable).parent / SERVE.split()[0]
    # A shell starts programs in the background with SIGINT ignored, and this one ends by it.
    process = subprocess.Popen(
        [str(program), *SERVE.split()[1:]], cwd=ROOT, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    sender = Client()

    def is_up() -> bool:
        assert process.poll() is None
        try:
            return sender.send("/health").status == 200
        except OSError:
            return False

    try:
        wait_for(is_up)
        ray.init(address="auto", namespace="serve", log_to_driver=False)
        yield sender
    finally:
        ray.shutdown()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The same engine in this process."""
    with open_demo(max_model_len=512) as made:
        yield made


def busy_replica(client: Client) -> str:
    """The name of a replica that runs a request."""

    def find() -> str | None:
        states = client.result("/health")["replicas"]
        return next((one["replica"] for one in states if one["num_outputs"]), None)

    return str(wait_for(find))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "max_tokens": 450, "ignore_eos": True},
        {
            "seed": 6,
            "max_tokens": 400,
            "n": 2,
            "frequency_penalty": 0.2,
            "ignore_eos": True,
            "stop": ["return None", "except"],
            "min_tokens": 200,
        },
    ],
)
def test_a_killed_engine_is_not_noticed(sampling: dict[str, Any], client: Client, llm: LLM) -> None:
    processes = wait_for(lambda: found if len(found := engines()) == 2 else None)
    (expected,) = llm.generate(PROMPT, SamplingParams(**sampling))
    body = {"prompt": PROMPT, "stream": True, "return_token_ids": True} | sampling
    killed = None
    outputs: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "finish_reason": None} for _ in expected.outputs
    ]
    response = client.send(COMPLETIONS, body)
    assert response.status == 200
    num_events = 0
    while (line := response.readline().strip()) != b"data: [DONE]":
        if not line:
            continue
        event = json.loads(line.removeprefix(b"data: "))
        assert "error" not in event, event
        (choice,) = event["choices"]
        output = outputs[choice["index"]]
        output["text"] += choice["text"]
        output["token_ids"] += choice["token_ids"]
        output["finish_reason"] = choice["finish_reason"]
        num_events += 1
        if num_events == 5:
            killed = busy_replica(client)
            os.kill(processes[killed], signal.SIGKILL)
    assert killed is not None
    for got, want in zip(outputs, expected.outputs, strict=True):
        assert got["text"] == want.text
        assert got["token_ids"] == want.token_ids
        assert got["finish_reason"] == want.finish_reason
    with client.send("/metrics") as answer:
        text = answer.read().decode()
    (line_of_resumed,) = [one for one in text.splitlines() if "outputs_resumed_total{" in one]
    assert float(line_of_resumed.split()[-1]) >= 1
    assert 'paceline_replica_up{model="paceline-demo",replica="' in text


def test_requests_follow_their_prefix(client: Client) -> None:
    wait_for(lambda: len(engines()) == 2)
    prefix = "def f(x):\n    return x + 1\n" * 8
    cached = []
    for number in range(4):
        body = {"prompt": f"{prefix}# {number}\n", "max_tokens": 4, "temperature": 0}
        usage = client.result(COMPLETIONS, body)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) >= 64


def test_a_client_that_goes_away_ends_its_request(client: Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "n": 4, "stream": True}
    response = client.send(COMPLETIONS, body)
    response.readline()
    response.close()
    wait_for(lambda: all(one["num_outputs"] == 0 for one in client.result("/health")["replicas"]))


def test_what_the_engine_refuses_is_an_error(client: Client) -> None:
    response = client.send(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0})
    assert response.status == 400
    assert json.loads(response.read())["error"]["param"] == "max_tokens"


def test_grammars_reach_the_engines(client: Client) -> None:
    body = {"prompt": PROMPT, "structured_outputs": {"choice": ["alpha", "omega"]}, "seed": 1}
    (choice,) = client.result(COMPLETIONS, body)["choices"]
    assert choice["text"] in ("alpha", "omega") and choice["finish_reason"] == "stop"


def test_chats_run(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "class Stack:"}], "max_tokens": 8}
    answer = client.result("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_streams_end_before_their_replicas(client: Client) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 480,
        "n": 8,
        "seed": 1,
        "ignore_eos": True,
        "speculative": {"enabled": False},
    }
    expected = client.result(COMPLETIONS, body)
    answers: list[dict[str, Any]] = []
    streams = [
        threading.Thread(target=lambda: answers.append(client.result(COMPLETIONS, body)))
        for _ in range(3)
    ]
    for stream in streams:
        stream.start()
    busy_replica(client)
    config = yaml.safe_load((ROOT / "examples/ray/demo.yaml").read_text())
    (application,) = config["applications"]
    application["args"]["engines"]["num_replicas"] = 1
    serve.run(build_app(application["args"]), name=application["name"])
    for stream in streams:
        stream.join()
    assert len(engines()) == 1
    for answer in answers:
        assert [one["text"] for one in answer["choices"]] == [
            one["text"] for one in expected["choices"]
        ]
    assert len(answers) == 3


# ---- without a cluster ---------------------------------------------------------------------------


def test_the_options_of_deployments_are_passed_on() -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 5}
    app = build_app(
        {
            "max-num-seqs": 4,
            "max_queue": 6,
            "engines": {"autoscaling_config": scaling, "graceful_shutdown_timeout_s": 7},
            "servers": {"num_replicas": 2},
        }
    )
    server = app._bound_deployment
    assert server.num_replicas == 2
    assert server.max_ongoing_requests == 3 * 10
    engine = server.init_args[0]._bound_deployment
    assert engine.max_ongoing_requests == 10
    config = engine._deployment_config
    assert config.autoscaling_config.max_replicas == 3
    assert config.graceful_shutdown_timeout_s == 7
    assert config.request_router_config.request_router_kwargs["max_num_seqs"] == 4
    assert engine.ray_actor_options["num_gpus"] == 0  # a demo


def test_the_end_of_the_server_closes_what_is_served() -> None:
    # The last spans are sent then, which takes up to ten seconds, so not in the event loop.
    said: list[Any] = []

    async def app(*_: Any) -> None:
        raise AssertionError("no request")

    async def main() -> None:
        messages = iter(["lifespan.startup", "lifespan.shutdown"])

        async def receive() -> Any:
            return {"type": next(messages)}

        async def send(message: Any) -> None:
            said.append(message["type"])

        loop_thread = threading.get_ident()
        lifespan = _Lifespan(app, lambda: said.append(threading.get_ident() != loop_thread))
        await lifespan({"type": "lifespan"}, receive, send)

    asyncio.run(main())
    assert said == ["lifespan.startup.complete", True, "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 80}, "'port' is not an option of the Ray application: http_options"),
        (
            {"allow-drafter-changes": True},
            "'allow-drafter-changes' is not an option of the Ray application: its engines keep",
        ),
        ({"replicas": 2}, "'replicas' is not an option .* num_replicas, or autoscaling_config"),
        ({"max-num-seq": 2}, "the Ray application: unknown key 'max-num-seq'; did you mean"),
        ({"engines": 2}, "engines is 2; allowed: arguments of ray.serve.deployment"),
        ({"max-num-seqs": 0}, "--max-num-seqs is 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_app(options)


def test_the_manifest_of_kuberay_is_valid() -> None:
    manifest = yaml.safe_load((ROOT / "examples/kuberay/rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    assert application["import_path"] == "paceline.ray:build_app"
    server = build_app(application["args"])._bound_deployment
    engine = server.init_args[0]._bound_deployment
    assert engine.ray_actor_options["num_gpus"] == 1
    cluster = manifest["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == ray.__version__
    templates = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in templates:
        (container,) = group["template"]["spec"]["containers"]
        (variable,) = container["env"]
        assert variable["name"] == "PACELINE_API_KEY"
        assert variable["valueFrom"]["secretKeyRef"] == {"name": "paceline", "key": "api-key"}
        assert container["resources"]["limits"] == container["resources"]["requests"]
    (workers,) = cluster["workerGroupSpecs"]
    scaling = application["args"]["engines"]["autoscaling_config"]
    assert workers["maxReplicas"] >= scaling["max_replicas"]
    (worker,) = workers["template"]["spec"]["containers"]
    limits = worker["resources"]["limits"]
    assert (
        int(limits["nvidia.com/gpu"])
        >= application["args"]["engines"]["ray_actor_options"]["num_gpus"]
    )
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > 300
    ports = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    assert config["http_options"]["port"] in [port["containerPort"] for port in ports]
