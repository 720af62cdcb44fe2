# SPDX-License-Identifier: Apache-2.0
"""--cors-origin: which pages of other origins may use the server."""

from __future__ import annotations

import http.client
import logging
from typing import Any

import pytest

from paceline import LLM
from running_server import RunningServer

COMPLETIONS = "/v1/completions"
OURS, OTHERS = "https://app.example.org", "https://evil.example.org"


def preflight(server: RunningServer, origin: str) -> http.client.HTTPResponse:
    """What a browser asks before a request of a page with a key."""
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return server.send(COMPLETIONS, method="OPTIONS", headers=asked)


def test_pages_of_an_origin_may_use_the_server(plain_llm: LLM) -> None:
    with RunningServer(plain_llm, api_keys=["k"], cors_origins=[OURS]) as server:
        with preflight(server, OURS) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == OURS
            allowed = response.headers["access-control-allow-headers"]
            assert {"authorization", "content-type"} <= set(allowed.split(","))
            assert "POST" in response.headers["access-control-allow-methods"]
            assert response.headers["access-control-allow-credentials"] is None
        with preflight(server, OTHERS) as response:
            assert response.status == 400
            assert response.headers["access-control-allow-origin"] is None
        # An error can be read too, and the key is needed all the same.
        for headers, status in (({}, 401), ({"authorization": "Bearer k"}, 200)):
            sent: Any = headers | {"origin": OURS}
            with server.send(COMPLETIONS, {"prompt": "a"}, headers=sent) as response:
                assert response.status == status
                assert response.headers["access-control-allow-origin"] == OURS
                assert "x-request-id" in response.headers["access-control-expose-headers"]
        streamed = {"prompt": "a", "stream": True}
        sent = {"authorization": "Bearer k", "origin": OURS}
        with server.send(COMPLETIONS, streamed, headers=sent) as response:
            assert response.headers["access-control-allow-origin"] == OURS
            assert response.read().endswith(b"data: [DONE]\n\n")
        sent["origin"] = OTHERS
        with server.send(COMPLETIONS, {"prompt": "a"}, headers=sent) as response:
            assert response.headers["access-control-allow-origin"] is None


def test_no_other_origin_is_allowed_by_default(plain_llm: LLM) -> None:
    with RunningServer(plain_llm) as server:
        with preflight(server, OURS) as response:
            assert response.status == 405
            assert response.headers["access-control-allow-origin"] is None
        with server.send("/version", headers={"origin": OURS}) as response:
            assert response.headers["access-control-allow-origin"] is None


@pytest.mark.parametrize("keys", [[], ["k"]])
def test_all_origins_are_allowed_with_a_note(
    plain_llm: LLM, keys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="paceline"),
        RunningServer(plain_llm, api_keys=keys, cors_origins=["*"]) as server,
        preflight(server, OTHERS) as response,
    ):
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == "*"
    assert ("there is no --api-key" in caplog.text) == (not keys)
