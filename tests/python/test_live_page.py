# SPDX-License-Identifier: Apache-2.0
"""The page at /: in Chromium it shows what the engine gives, and it needs no other host."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, find_chromium
from paceline import LLM, RequestOutput, SamplingParams
from paceline.demo import find_demo
from paceline.server.app import make_app
from paceline.server.bodies import Receive
from paceline.server.connection import Send
from paceline.server.guard import App, Scope
from paceline.server.service import Service
from running_server import RunningServer

KEY = "secret"
K = 4
PROMPT = "def read_lines(path):\n"
# The lowest ratio of contrast of text with less than 1 (WCAG 2, level AA).
CONTRAST = (Path(__file__).parents[1] / "support" / "contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    demo = find_demo("draft_model")
    config = demo.speculative_config()
    with (
        LLM(demo.target, speculative_config=config, max_num_seqs=4, max_model_len=1024) as llm,
        RunningServer(llm, api_keys=[KEY]) as server,
    ):
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("the test of the page needs Chromium: apt-get install chromium")
    with Browser(executable) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Browser]:
    """The page, after the key was given."""
    browser.set_size(1240, 900)
    browser.open(f"http://127.0.0.1:{server.port}/")
    give_key(browser, KEY)
    browser.wait_for("!document.getElementById('main').hidden")
    browser.problems.clear()  # the key was missing
    yield browser
    assert browser.problems == []
    host = f"127.0.0.1:{server.port}"
    assert all(re.match(rf"(http://{host}/|about:|data:)", url) for url in browser.urls)


def give_key(browser: Browser, key: str) -> None:
    browser.wait_for("!document.getElementById('key-form').hidden")
    assert browser.run("document.activeElement.id") == "key"
    browser.call("Input.insertText", text=key)
    browser.press("Enter", text="\r")


def text_of(browser: Browser, name: str) -> str:
    return str(browser.run(f"document.getElementById({name!r}).textContent"))


def fill(browser: Browser, **fields: Any) -> None:
    for name, value in fields.items():
        element = f"document.getElementById({name.replace('_', '-')!r})"
        browser.run(f"{element}.value = {json.dumps(value)}")


def finished(browser: Browser) -> None:
    browser.wait_for("document.getElementById('run-state').textContent.includes(' tokens in ')")


def tokens(browser: Browser) -> list[list[str]]:
    """The text and the source of each token that the page shows."""
    return browser.all("#output .token", "[e.textContent, e.dataset.source]")


def expected(output: RequestOutput) -> tuple[str, list[str]]:
    one = output.outputs[0]
    assert one.token_sources is not None
    return one.text, list(one.token_sources)


def test_the_page_needs_no_key_and_no_other_host(server: RunningServer) -> None:
    with server.send("/") as response:
        assert response.status == 200
        html, policy = response.read().decode(), response.headers["content-security-policy"]
    for kind in ("style", "script"):
        (inline,) = re.findall(rf"<{kind}[^>]*>(.*?)</{kind}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"(src|href|action)=[\"'](?!data:)", html)
    # Addresses in it are names of XML.
    assert set(re.findall(r"https?://[\w./]+", html)) == {"http://www.w3.org/2000/svg"}


def test_stats_are_those_of_the_engine(server: RunningServer) -> None:
    assert server.ask("/v1/stats")[0] == 401
    stats = server.result("/v1/stats", headers={"authorization": f"Bearer {KEY}"})
    assert stats | {"uptime_s": 0} == server.llm.stats() | {"uptime_s": 0}


def test_the_page_asks_for_the_key(browser: Browser, server: RunningServer) -> None:
    browser.open(f"http://127.0.0.1:{server.port}/")
    give_key(browser, "wrong")
    browser.wait_for("document.getElementById('key-error').textContent")
    assert text_of(browser, "key-error") == "The server refuses this key."
    give_key(browser, "ключ")
    browser.wait_for("document.getElementById('key-error').textContent.includes('ASCII')")
    assert browser.run("document.getElementById('main').hidden")
    give_key(browser, KEY)
    browser.wait_for("!document.getElementById('main').hidden")
    assert KEY not in browser.run("document.documentElement.outerHTML")


def test_a_completion_by_keyboard(page: Browser, server: RunningServer) -> None:
    params = SamplingParams(
        seed=3,
        temperature=0.7,
        max_tokens=100,
        skip_special_tokens=False,
        return_token_sources=True,
    )
    (output,) = server.llm.generate(PROMPT, params, use_tqdm=False)
    text, sources = expected(output)
    fill(page, seed=3, max_tokens=100)
    page.run("document.getElementById('prompt').focus()")
    page.press("Enter", ctrl=True)
    finished(page)
    shown = tokens(page)
    assert "".join(one for one, _ in shown) == text
    assert [source for _, source in shown] == sources
    assert text_of(page, "output") == PROMPT + text

    counts = page.all("#legend .count", "parseInt(e.textContent)")
    assert counts == [sources.count(one) for one in ("accepted", "corrected", "bonus", "plain")]
    columns = page.all("#iterations g", "e.childElementCount")
    assert sum(columns) == len(sources)
    metrics = output.metrics.speculative_decoding
    assert metrics is not None and len(columns) == metrics["num_spec_steps"] + 1
    assert text_of(page, "per-iteration") == f"{len(sources) / len(columns):.2f}"
    assert text_of(page, "share-accepted") == f"{100 * metrics['draft_acceptance_rate']:.0f} %"
    rows = page.all("#positions tr", "e.cells[2].textContent")
    assert rows == [f"{100 * share:.0f} %" for share in metrics["acceptance_per_position"]]
    assert int(text_of(page, "rate").replace(",", "")) > 0


def test_a_chat_without_drafts(page: Browser, server: RunningServer) -> None:
    question = "class Stack:"
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        skip_special_tokens=False,
        num_speculative_tokens=0,
        return_token_sources=True,
    )
    messages = [{"role": "user", "content": question}]
    (output,) = server.llm.chat(messages, params, use_tqdm=False)
    text, sources = expected(output)
    page.run("document.querySelector('.modes input').focus()")
    page.press("ArrowRight")
    assert page.run("document.querySelector('.modes input:checked').value") == "chat"
    fill(page, prompt=question, temperature=0, max_tokens=24, drafts="0")
    page.run("document.getElementById('run').click()")
    finished(page)
    assert text_of(page, "output") == text and set(sources) == {"plain"}
    assert [source for _, source in tokens(page)] == sources


def test_a_request_is_stopped_and_errors_are_shown(page: Browser, server: RunningServer) -> None:
    fill(page, max_tokens=1000, temperature=1, seed=1)
    label = page.run("""new Promise((resolve) => {
      const button = document.getElementById("run");
      button.click();
      new MutationObserver((_, observer) => {
        if (document.querySelectorAll("#output .token").length < 10) return;
        observer.disconnect();
        resolve(button.textContent);
        button.click();
      }).observe(document.getElementById("output"), { childList: true });
    })""")
    assert label == "Stop"
    page.wait_for("document.getElementById('run-state').textContent === 'Stopped'")
    server.wait_until_idle()
    assert text_of(page, "run") == "Run"

    fill(page, prompt="")
    page.run("document.getElementById('run').click()")
    page.wait_for("document.getElementById('run-error').textContent")
    assert "prompt" in text_of(page, "run-error")
    assert page.problems and "400" in page.problems.pop()


def test_text_is_never_markup(page: Browser) -> None:
    markup = "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script>"
    fill(page, prompt=markup, max_tokens=4)
    page.run("document.getElementById('run').click()")
    finished(page)
    assert text_of(page, "output").startswith(markup)
    assert page.run("document.querySelectorAll('#output img, #output script').length") == 0
    # And if there were markup, the policy would refuse it.
    page.run(
        "document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\" onclick=\"1\">')"
    )
    page.run(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'document.title = \"bad\"'}))"
    )
    assert page.run("document.title") == "served · Paceline"
    assert any("Content Security Policy" in one for one in page.problems)
    page.problems.clear()


def test_the_figures_of_the_server_are_shown(page: Browser, server: RunningServer) -> None:
    page.wait_for("document.querySelectorAll('#groups tr').length > 0")
    assert page.run("document.getElementById('ranks-part').hidden")  # there is one rank
    names = page.all("#groups tr", "e.cells[0].textContent")
    groups = server.llm.stats()["kv_groups"]
    assert names == [
        f"{one['owner']} {one['kind']}{' ' + str(one['window']) if one['window'] else ''}"
        for one in groups
    ]
    body = {"prompt": PROMPT * 20, "max_tokens": 200, "temperature": 0}
    headers = {"authorization": f"Bearer {KEY}"}
    for _ in range(2):
        server.result("/v1/completions", body, headers=headers)
    server.wait_until_idle()
    page.wait_for("parseInt(document.getElementById('prefix-hits').textContent) > 0")
    page.wait_for("document.querySelector('#rates polyline') !== null")
    cached = [f"{one['cached_blocks']:,}" for one in server.llm.stats()["kv_groups"]]
    shown = "[...document.querySelectorAll('#groups tr')].map((e) => e.cells[3].textContent)"
    page.wait_for(f"{shown}.join() === {','.join(cached)!r}")


def test_the_memory_of_several_ranks_is_shown(browser: Browser) -> None:
    demo = find_demo("draft_model")
    with (
        LLM(demo.target, device="cpu", tensor_parallel_size=2, max_model_len=1024) as llm,
        RunningServer(llm) as ranked,
    ):
        browser.open(f"http://127.0.0.1:{ranked.port}/")
        browser.wait_for("document.querySelectorAll('#ranks tr').length === 2")
        assert not browser.run("document.getElementById('ranks-part').hidden")
        report = llm.memory_report()["ranks"]
        for column, keys in (
            (1, ("target_weight_bytes", "draft_weight_bytes")),
            (2, ("kv_pool_bytes",)),
            (3, ("workspace_bytes", "graph_bytes")),
        ):
            shown = browser.all("#ranks tr", f"e.cells[{column}].textContent")
            assert shown == [f"{sum(one[key] for key in keys) / 2**30:.2f}" for one in report]
        assert browser.all("#ranks tr", "e.cells[0].textContent") == ["0", "1"]
        browser.open("about:blank")
    assert browser.problems == []
    browser.urls.clear()


def test_a_proxy_may_put_the_page_below_a_path(
    browser: Browser, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def below(service: Service) -> App:
        app = make_app(service)

        async def without_path(scope: Scope, receive: Receive, send: Send) -> None:
            before, _, rest = scope["path"].partition("/model")
            await app({**scope, "path": "/not-found" if before else rest}, receive, send)

        return without_path

    monkeypatch.setattr("paceline.server.run.make_app", below)
    with RunningServer(server.llm) as inner:
        browser.open(f"http://127.0.0.1:{inner.port}/model/")
        fill(browser, max_tokens=4)
        browser.wait_for("!document.getElementById('main').hidden")
        browser.run("document.getElementById('run').click()")
        finished(browser)
        browser.open("about:blank")
    assert browser.problems == []
    browser.urls.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_fields_have_names(page: Browser, scheme: str) -> None:
    page.set_scheme(scheme)
    fill(page, seed=3, max_tokens=60)
    page.run("document.getElementById('run').click()")
    finished(page)
    found = page.run(CONTRAST)
    assert len(found) > 40 and min(ratio for ratio, _ in found) >= 4.5, sorted(found)[:5]
    backs = page.run("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", backs)[0]) < 60) == (scheme == "dark")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("textbox", "spinbutton", "combobox", "button", "radio", "searchbox")
    named = [node for node in nodes if node.get("role", {}).get("value") in roles]
    assert len(named) >= 8 and all(node["name"]["value"] for node in named)


def test_a_narrow_window_does_not_scroll_sideways(page: Browser) -> None:
    page.set_size(360, 800)
    time.sleep(0.05)
    assert page.run("document.documentElement.scrollWidth") <= 360
