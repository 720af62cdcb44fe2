# SPDX-License-Identifier: Apache-2.0
"""/openapi.json describes the bodies as they are read, and /docs shows it without another host."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from fastapi.openapi.models import OpenAPI

from paceline import LLM, SamplingParams
from paceline.server.errors import as_api_error
from paceline.server.fields import ServedModel, read_chat, read_completion
from paceline.server.formats import FORMATS
from paceline.server.message_fields import read_message
from paceline.server.openapi import docs_page, document
from paceline.server.response_fields import read_response
from paceline.server.thinking import Thinking
from running_server import RunningServer

DEFAULT = SamplingParams(max_tokens=None)


def any_model(name: str | None) -> None:
    pass


def read(reader: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    model = ServedModel(DEFAULT, any_model, FORMATS["hermes"], Thinking())
    return lambda given: reader(given, model)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
READERS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]] = {
    "Completion": ({"prompt": "a"}, lambda given: read_completion(given, DEFAULT, any_model)),
    "Chat": (CHAT, read(read_chat)),
    "Response": ({"input": "a"}, read(read_response)),
    "Message": (CHAT | {"max_tokens": 5}, read(read_message)),
}
# Without others a value of theirs is refused.
TOGETHER: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
}


def schema_of(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = document()["components"]["schemas"][name]
    return schema


def values_of(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Values that a schema of a field allows, and some that it does not, at its bounds."""
    (one, *_) = schema.get("anyOf", [schema])
    kind = one.get("type")
    if "enum" in one:
        return list(one["enum"]), ["nonesuch", 7]
    if kind == "boolean":
        return [True, False], ["yes", 1]
    if kind in ("integer", "number"):
        most = one.get("maximum")
        allowed = [] if most is None else [most]
        wrong: list[Any] = ["a", True] + ([] if most is None else [most + 1])
        if "minimum" in one:
            return [*allowed, one["minimum"]], [*wrong, one["minimum"] - 1]
        return [*allowed, 0.5], [*wrong, one["exclusiveMinimum"]]
    if kind == "string":
        longest = one.get("maxLength")
        too_long = [] if longest is None else ["x" * (longest + 1)]
        return ["x" * (longest or 1)], [7, *too_long]
    return [], [7]


@pytest.mark.parametrize("name", READERS)
def test_bodies_are_read_as_they_are_described(name: str) -> None:
    body, reader = READERS[name]
    described = schema_of(name)
    jsonschema.validate(body, described)
    reader(dict(body))
    num_values = 0
    for field, schema in described["properties"].items():
        allowed, wrong = values_of(schema)
        for value in allowed:
            given = body | TOGETHER.get(field, {}) | {field: value}
            jsonschema.validate(given, described)
            try:
                reader(given)
            except Exception as error:  # for another reason than the type or the range
                message = as_api_error(error).message
                others = ("best_of", "parallel_tool_calls", "min_tokens", "echo", "tool_choice")
                others += ("add_generation_prompt", "continue_final_message")
                assert field in (*others, "guided_regex", "guided_grammar"), message
            num_values += 1
        for value in wrong:
            given = body | TOGETHER.get(field, {}) | {field: value}
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(given, described)
            with pytest.raises(Exception) as caught:
                reader(given)
            assert as_api_error(caught.value).status == 400, (field, value, caught.value)
            num_values += 1
        reader(body | ({} if field in described["required"] else {field: None}))
    assert num_values > 60
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body | {"nonesuch": 1}, described)


def test_the_document_is_valid_and_has_all_routes(plain_llm: LLM) -> None:
    OpenAPI.model_validate(document())
    with RunningServer(plain_llm, api_keys=["k"], allows_drafter_changes=True) as server:
        described = server.result("/openapi.json")
        assert described == document()
        key = {"authorization": "Bearer k"}
        listed = server.result("/v1/capabilities", headers=key)["server"]["fields"]
        for path, methods in described["paths"].items():
            ((method, operation),) = methods.items()
            if method == "post":
                assert server.ask(path, {"nonesuch": 1}, headers=key)[0] == 400, path
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                schema = described["components"]["schemas"][ref.rpartition("/")[2]]
                if path in listed:
                    assert set(schema["properties"]) == set(listed[path])
            else:
                is_open = operation.get("security") == []
                shown = path.replace("{name}", "served")
                with server.send(shown) as response:
                    assert response.status == (200 if is_open else 401), path
                with server.send(shown, headers=key) as response:
                    assert response.status == 200
                    content = operation["responses"]["200"]["content"]
                    if response.read():
                        kind = response.headers["content-type"].partition(";")[0]
                        assert kind in content, path


def test_the_page_needs_no_other_host() -> None:
    page, headers = docs_page()
    text = page.decode()
    assert "http" not in re.sub(r'<meta name="viewport"[^>]*>', "", text).replace("/v1", "")
    assert "<script" not in text and "src=" not in text
    assert headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    for field in ("temperature", "stop_sequences", "cache_salt", "max_output_tokens"):
        assert f"<code>{field}</code>" in text
