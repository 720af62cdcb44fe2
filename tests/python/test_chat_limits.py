# SPDX-License-Identifier: Apache-2.0
"""Chat templates that take too much are stopped, and rendering goes on in a process of its own."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest

from paceline import chat_content, chat_process
from test_chat_template import TEMPLATES, apply

_DOUBLED = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
_TWICE = "{% for i in range(99999) %}{% for j in range(99999) %}"

HOSTILE = {
    "loops": _TWICE + "{% endfor %}{% endfor %}",
    "filtered loop": _TWICE
    + "{% for k in range(9) if false %}{% endfor %}{% endfor %}{% endfor %}",
    "literals": _TWICE + "{% set x = [" + "0," * 50_000 + "] %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(50) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "concatenation": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "sum": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "square": "{% set n = namespace(x=3) %}{% for i in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "output": "{% set x = 'a' * 8000000 %}{{ x }}{{ x }}",
    "shared lists": _DOUBLED + "{% endfor %}{{ n.x }}",
    "shared lists in JSON": _DOUBLED + "{% endfor %}{{ n.x | tojson }}",
    "shared lists in a method": _DOUBLED + "{% endfor %}{{ '{}'.format(n.x) }}",
    "shared lists in a namespace": _DOUBLED + "{% endfor %}{{ n }}",
    "shared lists compared": _DOUBLED + "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "shared tuples hashed": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "product": "{{ 'a' * 1000000000000 }}",
    "product of a list": "{{ 1000000000000 * [1] }}",
    "power": "{{ 9 ** 99999 }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent map": "{{ '%(a)s' * 3000 % {'a': 'b' * 4000000} }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "indent": "{{ 'a\nb' | indent(1000000000) }}",
    "json indent": "{{ {'a': [1]} | tojson(indent=1000000000) }}",
    "join": "{{ range(99999) | join('a' * 1000000) }}",
    "join characters": "{{ ('a' * 8000000) | join('b' * 1000000) }}",
    "replace": "{{ ('a' * 8000000) | replace('a', 'b' * 1000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "round": "{{ 1 | round(-1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "slices": "{{ [1] | slice(1000000000) | list }}",
    "range": "{{ range(1000000000) }}",
    "sum of lists": "{% set x = [[1]] * 90000 %}{{ x | sum(start=[]) }}",
    "search": "{% set x = 'a' * 4000000 %}{% for i in range(9999) %}"
    "{{ x.rfind('b' + x[:2000000]) }}{% endfor %}",
    "strip": "{% set x = 'a' * 4000000 %}{% for i in range(9999) %}"
    "{% set y = x.strip('b' * 2000000) %}{% endfor %}",
    "copies": "{% set x = 'a' * 4000000 %}{% for i in range(9999) %}"
    "{% set y = x[1:] %}{% endfor %}",
    "time": _TWICE + "{{ strftime_now('%c') }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenth of the time, to save it: the limit bounds every one of these alike."""
    monkeypatch.setattr(chat_process, "MAX_CPU_S", chat_process.MAX_CPU_S / 10)
    monkeypatch.setattr(chat_content, "_MAX_CPU_S", chat_process.MAX_CPU_S / 10)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of any test before
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"exceeds a limit|Range too big"):
        apply(HOSTILE[name])
    chat_process._renderer.close()  # so that its memory is known
    assert time.perf_counter() - start < 30
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    allowed = (chat_process.MAX_MEMORY_BYTES + (256 << 20)) >> 10
    assert children < max(allowed, largest + 1)


def test_the_process_has_a_limit_of_its_memory() -> None:
    """The system enforces it, whatever processes have run before this test."""
    assert chat_process.render("a", {}) == "a"
    process = chat_process._renderer._process
    assert process is not None
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
    num_pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    now = num_pages * resource.getpagesize()
    assert soft == hard
    assert chat_process.MAX_MEMORY_BYTES < hard <= now + chat_process.MAX_MEMORY_BYTES


def test_a_template_takes_no_more_than_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_process, "MAX_CPU_S", 0.5)
    chat_process._renderer.close()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(chat_process.TemplateError, match=r"more than 0\.5 s of CPU time"):
        chat_process.render(HOSTILE["loops"], {})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 0.4 < used < 2  # with the start of the process


def test_rendering_goes_on_after_a_template_that_was_stopped() -> None:
    with pytest.raises(chat_process.TemplateError, match="exceeds a limit"):
        chat_process.render(HOSTILE["calls"], {}, 0.1)
    assert chat_process.render("{{ x }}", {"x": "\ud800é"}) == "\ud800é"


def test_a_process_that_has_ended_is_started_again() -> None:
    assert chat_process.render("a", {}) == "a"
    process = chat_process._renderer._process
    assert process is not None
    process.kill()
    process.wait()
    assert chat_process.render("b", {}) == "b"


def test_a_forked_child_has_a_process_of_its_own() -> None:
    assert chat_process.render("a", {}) == "a"
    child = os.fork()
    if child == 0:
        os._exit(0 if chat_process.render("{{ x }}", {"x": "b"}) == "b" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert chat_process.render("c", {}) == "c"


def test_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "a"}]
    with suppress(ValueError):
        apply("{% set _ = dict.update(messages[0], {'content': 'b'}) %}", messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_long_conversations_are_within_the_limits() -> None:
    talk = [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "a " * 99}]
    for name in ("llama3", "qwen3", "qwen3_5", "gemma3", "gemma4", "harmony"):
        text = apply((TEMPLATES / f"{name}.jinja").read_text(), talk * 1000)
        assert text.count("word") == 50_000
    content = "x" * 1_000_000
    text = apply((TEMPLATES / "qwen3.jinja").read_text(), [{"role": "user", "content": content}])
    assert content in text
